"""What FlashAttention's three lines are called with, played on the CPU, and what each is refused for."""

import dataclasses
import sys
from typing import Any

import pytest
import torch
from doubles_attention import CapturedCase, PagedCase, dense_attention, make_case, make_problem, make_spec
from doubles_paged_kernels import PlayedFlashAttention

from aserve.attention import flash_attention_flavours, installed
from aserve.attention.base import PHASES, AttentionProblem, AttentionSpec, CaptureShape, Phase
from aserve.attention.flash_attention_backend import FlashAttentionBackend
from aserve.attention.flash_attention_flavours import FLAVOURS, FlashAttention2, FlashAttention3, FlashAttention4
from aserve.errors import ConfigError

BF16 = torch.bfloat16
CPU = torch.device("cpu")
SETUPS = [(FlashAttention4, (10, 0), 16), (FlashAttention3, (9, 0), 1), (FlashAttention2, (8, 0), 256)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> PlayedFlashAttention:
    played = PlayedFlashAttention()
    for flavour in FLAVOURS:
        monkeypatch.setitem(sys.modules, flavour.module, played)
    return played


def install(monkeypatch: pytest.MonkeyPatch, *flavours: type[Any]) -> None:
    names = {flavour.name for flavour in flavours}
    monkeypatch.setattr(flash_attention_flavours, "has_flash_attention", lambda name: name in names)


def problem_of(spec: AttentionSpec, capability: tuple[int, int], page_size: int) -> AttentionProblem:
    return AttentionProblem("cuda", BF16, BF16, page_size, (spec.kind,), capability)


def check(output: torch.Tensor, lse: torch.Tensor | None, case: PagedCase, spec: AttentionSpec) -> None:
    expected, expected_lse = dense_attention(case, spec)
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=1e-2)
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("flavour", "capability", "page_size"), SETUPS)
@pytest.mark.parametrize("option", [{}, {"sliding_window": 5}, {"softcap": 2.0}])
@pytest.mark.parametrize(
    ("query_lens", "key_lens", "num_decodes"),
    [([1, 1, 7, 20], [9, 40, 7, 33], 2), ([1, 1], [9, 40], 2), ([7, 20], [7, 33], 0)],
)
def test_steps(
    flavour: type[Any],
    capability: tuple[int, int],
    page_size: int,
    option: dict[str, Any],
    query_lens: list[int],
    key_lens: list[int],
    num_decodes: int,
    library: PlayedFlashAttention,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, flavour)
    spec = make_spec(4, 2, 64, **option)
    backend = FlashAttentionBackend(problem_of(spec, capability, page_size), CPU)
    case = make_case(spec, query_lens, key_lens, num_decodes, page_size=page_size, dtype=BF16)
    out = torch.full_like(case.q, torch.nan)
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True, out=out)
    assert output.data_ptr() == out.data_ptr()
    check(output, lse, case, spec)
    assert len(library.calls) == bool(num_decodes) + (num_decodes < len(query_lens))
    _, no_lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec)
    assert no_lse is None


def test_version_4_takes_sinks(library: PlayedFlashAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FlashAttention4)
    spec = make_spec(4, 2, 64, sinks=torch.tensor([-1.0, 0.0, 2.0, 0.5]))
    backend = FlashAttentionBackend(problem_of(spec, (9, 0), 16), CPU, ("prefill",))
    case = make_case(spec, [7, 20], [7, 33], 0, dtype=BF16)
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    check(output, lse, case, spec)
    assert library.calls[0]["num_splits"] == 1, "Hopper has no split-KV"


def test_captured_chunks_leave_other_tokens_alone(
    library: PlayedFlashAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FlashAttention4)
    spec = make_spec(4, 2, 64)
    backend = FlashAttentionBackend(problem_of(spec, (9, 0), 16), CPU, ("prefill",))
    assert backend.captures_chunks
    assert not backend.captures_decodes
    captured = CapturedCase.make(CaptureShape(40, 3, 2), 3, 16)
    section = captured.tables.section(3, 5)
    plan = backend.prepare_capture(CaptureShape(40, 0, 2), section)
    for seed, (query_lens, key_lens) in enumerate((([1, 1, 7, 20], [9, 40, 7, 33]), ([1, 1, 5], [3, 40, 17]))):
        case = make_case(spec, query_lens, key_lens, 2, dtype=BF16, seed=seed)
        captured.fill(case, 0)
        backend.convert(plan)
        q = torch.zeros(40, 4, 64, dtype=BF16)
        q[: len(case.q)] = case.q
        out = torch.full_like(q, 7.0)
        _, lse = backend.forward(q, case.layer_kv, plan, spec, return_lse=True, out=out)
        chunks = slice(2, len(case.q))
        expected, expected_lse = dense_attention(case, spec)
        torch.testing.assert_close(out[chunks].double(), expected[2:], rtol=1e-2, atol=1e-2)
        assert lse is not None
        torch.testing.assert_close(lse[chunks].double(), expected_lse[2:], rtol=1e-4, atol=1e-4)
        assert bool((out[:2] == 7.0).all())
        assert bool((out[len(case.q) :] == 7.0).all())
    addresses = {call["page_table"].data_ptr() for call in library.calls}
    assert len(addresses) == 1


@pytest.mark.parametrize(
    ("flavour", "capability", "phases"),
    [
        (FlashAttention3, (9, 0), ("prefill",)),
        (FlashAttention2, (8, 0), ("prefill",)),
        (FlashAttention4, (10, 0), PHASES),
    ],
)
@pytest.mark.usefixtures("library")
def test_what_is_not_captured(
    flavour: type[Any], capability: tuple[int, int], phases: tuple[Phase, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, flavour)
    backend = FlashAttentionBackend(problem_of(make_spec(4, 2, 64), capability, 256), CPU, phases)
    assert not backend.captures_chunks
    captured = CapturedCase.make(CaptureShape(40, 0, 2), 3, 256)
    with pytest.raises(ValueError, match="only chunks of a 'prefill,decode' pair are captured"):
        backend.prepare_capture(captured.shape, captured.tables)


@pytest.mark.usefixtures("library")
def test_each_phase_has_the_best_flavour_that_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FlashAttention4, FlashAttention3)
    backend = FlashAttentionBackend(problem_of(make_spec(4, 2, 64), (9, 0), 16), CPU)
    chosen = {phase: type(flavour) for phase, flavour in backend._flavours.items()}
    assert chosen == {"prefill": FlashAttention4, "decode": FlashAttention3}


REFUSALS = [
    (FlashAttention4, {"capability": (8, 0)}, "prefill", "reads no paged keys on a GPU of compute capability 8.0"),
    (FlashAttention4, {"capability": (12, 0)}, "prefill", "compute capability 12.0"),
    (FlashAttention4, {"capability": (9, 0)}, "decode", "no split-KV on Hopper"),
    (FlashAttention3, {"capability": (8, 0)}, "prefill", "for Hopper, not for compute capability 8.0"),
    (FlashAttention2, {"capability": (7, 5)}, "decode", "needs compute capability 8.0 or more, not 7.5"),
    (FlashAttention2, {"capability": (8, 0), "page_size": 16}, "decode", "a multiple of 256, not 16"),
    (FlashAttention3, {"dtype": torch.float32}, "decode", "float16 and bfloat16, not in float32"),
    (FlashAttention3, {"kv_dtype": torch.float8_e4m3fn}, "decode", "does not read float8_e4m3fn"),
    (FlashAttention3, {"device_type": "cpu"}, "decode", "CUDA device only, not on cpu"),
]


@pytest.mark.parametrize(("flavour", "change", "phase", "words"), REFUSALS)
def test_refusals(
    flavour: type[Any], change: dict[str, Any], phase: Phase, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, flavour)
    problem = dataclasses.replace(make_problem("cuda", BF16), capability=(9, 0), page_size=256)
    assert words in str(FlashAttentionBackend.refuse(dataclasses.replace(problem, **change), phase))


@pytest.mark.parametrize(("flavour", "capability"), [(FlashAttention3, (9, 0)), (FlashAttention2, (8, 0))])
def test_kinds_that_are_refused(
    flavour: type[Any], capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, flavour)
    for kind, words in (({"has_sinks": True}, "no attention sinks"), ({"head_dim": 100}, "not 100")):
        problem = dataclasses.replace(make_problem("cuda", BF16, **kind), capability=capability, page_size=256)
        assert words in str(FlashAttentionBackend.refuse(problem, "decode"))
    install(monkeypatch, FlashAttention4)
    problem = dataclasses.replace(make_problem("cuda", BF16, head_dim=192), capability=(10, 0))
    assert "does not know head_dim 192" in str(FlashAttentionBackend.refuse(problem, "prefill"))


def test_a_library_that_cannot_be_loaded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FlashAttention3)
    monkeypatch.setitem(sys.modules, FlashAttention3.module, None)
    with pytest.raises(ConfigError, match="flash-attn 3 is installed but cannot be loaded"):
        FlashAttentionBackend(problem_of(make_spec(4, 2, 64), (9, 0), 16), CPU)


def test_flavours_are_found_by_their_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert "none of flash-attn-4, flash-attn 3, flash-attn 2 is installed" in str(installed.flash_attention_refusal())
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("raise RuntimeError('never imported to look')")
    found = {name: installed.has_flash_attention(name) for name in installed.FLASH_ATTENTION}
    assert found == {"flash-attn-4": True, "flash-attn 3": False, "flash-attn 2": False}
    for has_gpu, refusal in ((True, None), (False, "torch finds no CUDA device")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert installed.flash_attention_refusal() == refusal
