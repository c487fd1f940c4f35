"""What the tuning of the medium linear layers tries, calls and prints, on a tiny model and without a clock."""

from collections.abc import Callable, Sequence

import pytest
import torch

from aserve.builtin_models import BUILTIN_MODELS
from aserve.kernels.gpu import medium_linear_case, tune_medium_linear
from aserve.kernels.gpu.layer_case import LayerShape, model_layers
from aserve.kernels.gpu.medium_linear_candidates import SHARED_BYTES, candidates
from aserve.kernels.gpu.medium_linear_case import MediumLinearCase
from aserve.kernels.gpu.medium_linear_launch import TOKEN_BUCKETS, MediumLinearLaunch, MediumLinearShape

TINY = {
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 8,
}
FAST, SLOW = MediumLinearLaunch(64, 16, ahead=0), MediumLinearLaunch(64, 16, num_parts=2)


class Clock:
    """Takes calls for what the tests say they take: 2 us with ``FAST``, 9 with ``SLOW``, 1 for a norm."""

    def __init__(self, torch_us: float) -> None:
        self._torch_us = torch_us

    def time_calls(self, calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        launches = [part.keywords["launch"] for part in calls[0].args if hasattr(part, "keywords")]  # type: ignore[attr-defined]
        if launches:
            return {FAST: 2.0, SLOW: 9.0}[launches[0]]
        return 1.0 if len(calls[0].args) == 2 else self._torch_us  # type: ignore[attr-defined]


@pytest.fixture(params=[4.0, 2.02])
def torch_us(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Let torch be slow, and then not slow enough; on float16, which the interpreter can multiply."""
    monkeypatch.setitem(BUILTIN_MODELS, "Tiny", TINY)
    monkeypatch.setattr(tune_medium_linear, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(tune_medium_linear, "candidates", lambda shape: [SLOW, FAST])
    for module in (tune_medium_linear, medium_linear_case):
        monkeypatch.setattr(module, "DTYPE", torch.float16)
    monkeypatch.setattr(medium_linear_case, "num_cold_copies", lambda num_bytes: 1)
    monkeypatch.setattr(medium_linear_case, "time_calls", Clock(request.param).time_calls)
    return float(request.param)


ARGUMENTS = ["--models", "Tiny", "--tokens", "16", "--no-overlap", "--jobs", "1"]


def test_a_line_of_the_table_where_torch_is_slower(torch_us: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_medium_linear.main([*ARGUMENTS, "--layers", "gate_up", "down"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[2]] == ["# Tiny gate_up", "# Tiny down"]
    launch = "MediumLinearLaunch(64, 16, 1, 64, 4, 4, 1, 0)"
    if torch_us == 4.0:
        measured = "# 2.0 us, 1 GB/s beside the norm's 1.0; torch 4.0"  # 1 KiB in 1 us
        assert lines[1] == f"MediumLinearShape(8, 32, 16, is_gated=True): {launch},  {measured}"
        assert lines[3].startswith(f"MediumLinearShape(32, 8, 16): {launch},  # 2.0 us")
    else:
        assert lines[1].startswith(f"# 16 tokens: torch stays; {launch}")
    assert lines[-1].startswith("# compiled 4 in ")


@pytest.mark.usefixtures("torch_us")
def test_all_times_and_processes_that_compile(capsys: pytest.CaptureFixture[str]) -> None:
    tune_medium_linear.main([*ARGUMENTS[:-1], "2", "--layers", "qkv", "--all"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "# 16 tokens 9.00 us MediumLinearLaunch(64, 16, 1, 64, 4, 4, 2, 4)",
        "# 16 tokens 2.00 us MediumLinearLaunch(64, 16, 1, 64, 4, 4, 1, 0)",
    ]


@pytest.mark.usefixtures("torch_us")
def test_a_launch_that_is_wrong_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = medium_linear_case.apply_medium_linear

    def wrong(x, layer, result, overlap, launch):  # type: ignore[no-untyped-def]
        right(x, layer, result, overlap, launch)
        if launch == FAST:
            result[-1, -1] += 9.0

    monkeypatch.setattr(medium_linear_case, "apply_medium_linear", wrong)
    tune_medium_linear.main([*ARGUMENTS, "--layers", "o"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("# failed: MediumLinearLaunch(64, 16, 1, 64, 4, 4, 1, 0): ")
    assert "torch stays; MediumLinearLaunch(64, 16, 1, 64, 4, 4, 2, 4) # 9.0 us" in lines[2]


def test_compiling_beforehand_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    for kernel in ("multiply_tiles", "add_parts"):
        function = tune_medium_linear.apply_medium_linear.__globals__[kernel]
        monkeypatch.setattr(function, "run", lambda *values, warmup, **options: launched.append(warmup))
    layer = LayerShape("down", 32, 64)
    tune_medium_linear.compile_variant(tune_medium_linear.Variant(layer, SLOW, overlap=False))
    assert launched == [True, True]


@pytest.mark.parametrize("max_tokens", TOKEN_BUCKETS)
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-14B", "Llama-3.1-8B"])
def test_candidates_are_few_and_read_the_weight_once_or_twice(model: str, max_tokens: int) -> None:
    for layer in model_layers(model):
        shape = MediumLinearShape(layer.num_outputs, layer.width, max_tokens, layer.is_gated)
        launches = candidates(shape)
        assert 3 <= len(set(launches)) == len(launches) <= 12
        for launch in launches:
            num_tokens = launch.block_tokens * launch.token_blocks
            assert max_tokens <= 2 * num_tokens
            is_joint = layer.is_gated and launch.num_parts == 1
            rows = launch.block_outputs * (2 if is_joint else 1) + num_tokens
            assert rows * launch.block_width * 2 * launch.num_stages < SHARED_BYTES
            assert launch.block_outputs >= 64
            assert launch.num_warps in (4, 8)


def test_the_model_of_the_chip_prefers_busy_units_and_few_bytes() -> None:
    shape = MediumLinearShape(4096, 4096, 128)
    guess = candidates(shape)[0]
    num_programs = 4096 // guess.block_outputs * guess.num_parts
    assert 100 <= num_programs <= 264
    assert candidates(MediumLinearShape(151936, 4096, 128))[0].num_parts == 1


def test_a_layer_is_timed_beside_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(medium_linear_case, "num_cold_copies", lambda num_bytes: 2)
    monkeypatch.setattr(medium_linear_case, "time_calls", lambda calls: [call() for call in calls] and 1.0)
    for shape in (LayerShape("qkv", 16, 32, has_norm=True), LayerShape("down", 32, 64)):
        case = MediumLinearCase(shape, 32, torch.device("cpu"), overlap=False)
        norm, multiply = case._norm, case._multiply_in_torch
        monkeypatch.setattr(case, "_norm", lambda *values, norm=norm: order.append("norm") or norm(*values))
        monkeypatch.setattr(case, "_multiply_in_torch", lambda *v, run=multiply: order.append("product") or run(*v))
        case.time_torch(3)
    assert order == ["norm", "product"] * 2 + ["product", "norm"] * 2
