"""What the benches of the GPU operators call and print, on a tiny model and without a clock."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from aserve.bench import gpu_operators
from aserve.builtin_models import BUILTIN_MODELS
from aserve.kernels.gpu import layer_case, tune_small_linear
from aserve.kernels.gpu.small_linear_launch import SmallLinearLaunch, SmallLinearShape

TINY = {
    "hidden_size": 32,
    "intermediate_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 4,
}


@pytest.fixture(autouse=True)
def _tiny_and_timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN_MODELS, "Tiny", TINY)
    monkeypatch.setattr(gpu_operators, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(layer_case, "num_cold_copies", lambda num_bytes: 1)
    for module in (gpu_operators, layer_case):
        monkeypatch.setattr(module, "time_calls", call_once)


def call_once(calls: Sequence[Callable[[], object]]) -> float:
    calls[0]()
    return 2.0


def test_layers_of_a_model() -> None:
    shapes = [(layer.name, layer.num_rows, layer.width) for layer in layer_case.model_layers("Qwen3-8B")]
    assert shapes == [
        ("qkv", 6144, 4096),
        ("o", 4096, 4096),
        ("gate_up", 24576, 4096),
        ("down", 4096, 12288),
        ("head", 151936, 4096),
    ]


def test_bench_prints_a_row_an_operator_and_a_row_a_layer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_operators, "NUM_TOKENS", (1, 2))
    monkeypatch.setattr(gpu_operators, "SMALL_NUM_TOKENS", (1,))
    assert gpu_operators.main(["--models", "Tiny", "--no-flashinfer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("| rope_store")] == [
        "| rope_store | Tiny | 2.0 / 2.0 | 2.0 / 2.0 |"
    ]
    assert [line for line in lines if line.startswith("| qkv")] == ["| qkv | Tiny | 2 / 2 |"]  # 4 KiB in 2 us


def test_tuning_prints_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tune_small_linear, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(tune_small_linear, "candidates", only_two)
    assert tune_small_linear.main(["--models", "Tiny", "--layers", "gate_up", "--tokens", "1"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("SmallLinearShape(4, 32, 1, is_gated=True): SmallLinearLaunch(2, 256, 2, 1),  # 2.0 us, ")
    assert output.endswith("# Tiny gate_up\n")


def test_the_best_launch_is_the_fastest() -> None:
    shape = SmallLinearShape(4096, 4096, token_slots=1)
    launches = list(tune_small_linear.candidates(shape))
    assert len(set(launches)) == len(launches) > 20
    assert tune_small_linear.best_launch(shape, lambda launch: -launch.block_rows * launch.num_warps) in launches
    best = tune_small_linear.best_launch(shape, lambda launch: abs(launch.block_rows - 4) + launch.num_warps)
    assert (best.block_rows, best.num_warps) == (4, 2)


def test_candidates_keep_within_registers() -> None:
    for slots in (1, 2, 4):
        for launch in tune_small_linear.candidates(SmallLinearShape(12288, 4096, slots, is_gated=True)):
            values = 2 * launch.block_rows * launch.block_columns // (32 * launch.num_warps)
            assert values <= 64 if launch.block_columns == 4096 else slots * values <= 128


def only_two(shape: SmallLinearShape) -> Iterator[SmallLinearLaunch]:
    yield SmallLinearLaunch(2, 256, 2)
    yield SmallLinearLaunch(4, 256, 2)
