"""What flashinfer's TensorRT-LLM entry points are called with, played on the CPU, and what is refused."""

import dataclasses
from typing import Any

import pytest
import torch
from doubles_attention import CapturedCase, dense_attention, make_case, make_problem, make_spec
from doubles_paged_kernels import PlayedTrtllm

from aserve.attention.base import AttentionProblem, AttentionSpec, CaptureShape, Phase
from aserve.attention.merge import convert_lse
from aserve.attention.trtllm_backend import TrtllmBackend

BF16 = torch.bfloat16
CPU = torch.device("cpu")
HOPPER, BLACKWELL = (9, 0), (10, 0)


def make_backend(spec: AttentionSpec, capability: tuple[int, int]) -> tuple[TrtllmBackend, PlayedTrtllm]:
    problem = AttentionProblem("cuda", BF16, BF16, 16, (spec.kind,), capability)
    played = PlayedTrtllm(is_xqa=capability == HOPPER)
    return TrtllmBackend(problem, CPU, decode=played.decode, prefill=played.prefill), played


OPTIONS: list[dict[str, Any]] = [{}, {"sliding_window": 5}, {"sinks": torch.tensor([-1.0, 0.0, 2.0, 0.5])}]


@pytest.mark.parametrize("option", OPTIONS, ids=["plain", "window", "sinks"])
@pytest.mark.parametrize(
    ("query_lens", "key_lens", "num_decodes"),
    [([1, 1, 7, 20], [9, 40, 7, 33], 2), ([1, 1], [9, 40], 2), ([7, 20], [7, 33], 0)],
)
def test_both_phases_on_blackwell(
    option: dict[str, Any], query_lens: list[int], key_lens: list[int], num_decodes: int
) -> None:
    spec = make_spec(4, 2, 64, **option)
    backend, played = make_backend(spec, BLACKWELL)
    case = make_case(spec, query_lens, key_lens, num_decodes, dtype=BF16)
    for batch in (case.batch, dataclasses.replace(case.batch, cu_key_lens=None)):
        output, lse = backend.forward(case.q, case.layer_kv, backend.plan(batch), spec, return_lse=True)
        expected, expected_lse = dense_attention(case, spec)
        torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=1e-2)
        assert lse is not None
        natural = convert_lse(lse, backend.lse_base, "e")
        torch.testing.assert_close(natural.double(), expected_lse, rtol=1e-4, atol=1e-4)
    assert len(played.decodes) == 2 * bool(num_decodes)
    assert len(played.chunks) == 2 * (num_decodes < len(query_lens))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 0.5)])
def test_decodes_on_hopper(scales: tuple[float, float]) -> None:
    spec = make_spec(4, 2, 64)
    backend, _ = make_backend(spec, HOPPER)
    case = make_case(spec, [1, 1, 1], [9, 40, 16], 3, dtype=BF16, scales=scales)
    wide = torch.zeros(3, 8, 64, dtype=BF16)
    wide[:, :4] = case.q
    output, lse = backend.forward(wide[:, :4], case.layer_kv, backend.plan(case.batch), spec)
    torch.testing.assert_close(output.double(), dense_attention(case, spec)[0], rtol=1e-2, atol=1e-2)
    assert lse is None
    with pytest.raises(ValueError, match="XQA, the decode kernel of this GPU, leaves no log-sum-exp"):
        backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)


def test_captured_decodes_keep_their_addresses() -> None:
    spec = make_spec(4, 2, 64)
    backend, played = make_backend(spec, HOPPER)
    assert backend.captures_decodes
    assert not backend.captures_chunks
    captured = CapturedCase.make(CaptureShape(5, 5, 0), 6, 16)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    for seed, key_lens in enumerate(([9, 40, 16, 90, 1], [3], [33, 64])):
        count = len(key_lens)
        case = make_case(spec, [1] * count, key_lens, count, dtype=BF16, seed=seed)
        backend.prepare_replay(plan, captured.fill(case, dummy_page=int(case.batch.page_table[0, 0])))
        backend.convert(plan)
        q = torch.cat((case.q, case.q.new_zeros(5 - count, 4, 64)))
        output, _ = backend.forward(q, case.layer_kv, plan, spec, out=torch.full_like(q, torch.nan))
        torch.testing.assert_close(output[:count].double(), dense_attention(case, spec)[0], rtol=1e-2, atol=1e-2)
    for name in ("block_tables", "seq_lens", "workspace_buffer"):
        assert len({call[name].data_ptr() for call in played.decodes}) == 1
    with pytest.raises(ValueError, match="only batches of decodes are captured"):
        backend.prepare_capture(CaptureShape(5, 4, 1), captured.tables)


REFUSALS: list[tuple[dict[str, Any], Phase, str]] = [
    ({"device_type": "cpu"}, "decode", "CUDA device only, not on cpu"),
    ({"capability": (8, 0)}, "decode", "no kernels for compute capability 8.0"),
    ({}, "prefill", "only its decode kernel, XQA, runs"),
    ({"dtype": torch.float32}, "decode", "float16 and bfloat16, not in float32"),
    ({"kv_dtype": torch.float8_e4m3fn}, "decode", "queries in 8 bits"),
    ({"page_size": 8}, "decode", "page_size 16, 32, 64, 128, not 8"),
    ({"page_size": 128, "capability": BLACKWELL}, "prefill", "page_size 16, 32, 64, not 128"),
]


@pytest.mark.parametrize(("change", "phase", "words"), REFUSALS)
def test_refusals(change: dict[str, Any], phase: Phase, words: str) -> None:
    problem = dataclasses.replace(make_problem("cuda", BF16), capability=HOPPER)
    assert TrtllmBackend.refuse(problem, "decode") is None
    assert words in str(TrtllmBackend.refuse(dataclasses.replace(problem, **change), phase))


@pytest.mark.parametrize(
    ("capability", "kind", "words"),
    [
        (HOPPER, {"softcap": 30.0}, "does not cap scores"),
        (HOPPER, {"head_dim": 72}, "in steps of 16, not 72"),
        (HOPPER, {"num_heads": 33, "num_kv_heads": 1}, "up to 32 heads per KV head, not 33"),
        (BLACKWELL, {"head_dim": 80}, "head_dim 64, 128, 256, not 80"),
    ],
)
def test_kinds_that_are_refused(capability: tuple[int, int], kind: dict[str, Any], words: str) -> None:
    problem = dataclasses.replace(make_problem("cuda", BF16, **kind), capability=capability)
    assert words in str(TrtllmBackend.refuse(problem, "decode"))
