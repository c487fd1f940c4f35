"""What FlashInfer's cake functions are called with, played on the CPU, and what is refused; not run on such a GPU."""

import dataclasses
import logging
from typing import Any

import pytest
import torch
from doubles_attention import (
    CapturedCase,
    PagedCase,
    dense_attention,
    make_case,
    make_problem,
    make_spec,
    torch_backend,
)
from doubles_cake_fmha import PlayedCakeFmha

from aserve.attention import cake_backend, installed
from aserve.attention.base import AttentionProblem, AttentionSpec, CaptureShape, KVOrder, LayerKV, Phase
from aserve.attention.cake_backend import CakeBackend
from aserve.attention.cake_blackwell import CakeBlackwellBackend
from aserve.attention.hybrid import HybridBackend
from aserve.attention.merge import convert_lse

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CPU = torch.device("cpu")
BLACKWELL = (10, 0)


def make_backend(spec: AttentionSpec, kv_dtype: torch.dtype = BF16) -> tuple[CakeBlackwellBackend, PlayedCakeFmha]:
    problem = AttentionProblem("cuda", BF16, kv_dtype, 16, (spec.kind,), BLACKWELL, max_num_seqs=8)
    played = PlayedCakeFmha()
    return CakeBlackwellBackend(problem, CPU, decode=played.decode, select_route=played.select_route), played


def decodes(spec: AttentionSpec, key_lens: list[int], order: KVOrder = "HND", **options: Any) -> PagedCase:
    case = make_case(spec, [1] * len(key_lens), key_lens, len(key_lens), dtype=BF16, **options)
    if order == "NHD":
        return case
    pool = case.layer_kv
    key, value = (pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (pool.key, pool.value))
    return dataclasses.replace(case, layer_kv=LayerKV(key, value, pool.key_scale, pool.value_scale))


SINKS = torch.tensor([-1.0, 0.0, 2.0, 0.5])


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("option", [{}, {"sliding_window": 5}, {"sinks": SINKS}], ids=["plain", "window", "sinks"])
def test_eager_decodes(option: dict[str, Any], order: KVOrder) -> None:
    spec = make_spec(4, 2, 128, **option)
    backend, played = make_backend(spec)
    case = decodes(spec, [9, 40, 16], order)
    wide = torch.zeros(3, 8, 128, dtype=BF16)
    wide[:, :4] = case.q
    output, lse = backend.forward(wide[:, :4], case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    expected, expected_lse = dense_attention(case, spec)
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=1e-2)
    assert lse is not None
    natural = convert_lse(lse, backend.lse_base, "e")
    torch.testing.assert_close(natural.double(), expected_lse, rtol=1e-4, atol=1e-4)
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec)
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=1e-2)
    assert lse is None
    assert len(played.calls) == 2


def test_8_bit_pages_and_their_scales() -> None:
    spec = make_spec(4, 2, 128)
    backend, _ = make_backend(spec, kv_dtype=FP8)
    case = decodes(spec, [33, 7], kv_dtype=FP8, scales=(0.25, 0.5), order="NHD")
    output, _ = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec)
    torch.testing.assert_close(output.double(), dense_attention(case, spec)[0], rtol=2e-2, atol=2e-2)


def test_captured_decodes_keep_their_addresses_and_their_route() -> None:
    spec = make_spec(8, 1, 128)
    backend, played = make_backend(spec)
    captured = CapturedCase.make(CaptureShape(5, 5, 0), 6, 16)
    before = backend.workspace_bytes
    plan = backend.prepare_capture(captured.shape, captured.tables)
    assert backend.workspace_bytes == before + 4 * 5 * 6
    assert backend.kernel_name(plan, spec) == "", "not before it has run"
    for seed, key_lens in enumerate(([9, 40, 16, 90, 1], [3], [33, 64])):
        count = len(key_lens)
        case = decodes(spec, key_lens, seed=seed)
        backend.prepare_replay(plan, captured.fill(case, dummy_page=int(case.batch.page_table[0, 0])))
        backend.convert(plan)
        q = torch.cat((case.q, case.q.new_zeros(5 - count, 8, 128)))
        output, _ = backend.forward(q, case.layer_kv, plan, spec, out=torch.full_like(q, torch.nan))
        torch.testing.assert_close(output[:count].double(), dense_attention(case, spec)[0], rtol=1e-2, atol=1e-2)
    for name in ("block_tables", "seq_lens", "workspace_buffer", "multi_ctas_kv_counter_buffer"):
        assert len({call[name].data_ptr() for call in played.calls}) == 1
    assert {call["max_seq_len"] for call in played.calls} == {96}, "of the table, whatever the step"
    assert len(played.asked) == 1
    assert backend.kernel_name(plan, spec) == "decode_aligned_bf16 ALIGNED_C8_BF16"
    with pytest.raises(ValueError, match="only batches of decodes are captured"):
        backend.prepare_capture(CaptureShape(5, 4, 1), captured.tables)


def test_a_plan_that_has_not_run_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(4, 2, 128)
    backend, _ = make_backend(spec)
    case = decodes(spec, [9, 40])
    plan = backend.plan(case.batch)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(backend, "device", torch.device("cuda"))
        with pytest.raises(RuntimeError, match="cake: a plan must run once before it is captured"):
            backend.forward(case.q, case.layer_kv, plan, spec)
    backend.forward(case.q, case.layer_kv, plan, spec)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(backend, "device", torch.device("cuda"))
    backend.forward(case.q, case.layer_kv, plan, spec)


def test_the_route_is_logged_and_told_the_compatibility_kernel_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    few, many = make_spec(4, 2, 128), make_spec(9, 1, 128)
    told = []
    for spec in (few, many):
        backend, played = make_backend(spec)
        for key_lens in ([9, 40], [7]):
            case = decodes(spec, key_lens)
            plan = backend.plan(case.batch)
            backend.forward(case.q, case.layer_kv, plan, spec)
        told.append(backend.kernel_name(plan, spec))
        assert len(played.asked) == 2
    assert told == ["decode_native_bf16", "compatibility kernel"]
    assert [record.getMessage() for record in caplog.records] == [
        "cake: FlashInfer's decode_native_bf16 for 2 sequences of up to 40 keys, head_dim 128",
        "cake: FlashInfer's compatibility kernel for 2 sequences of up to 40 keys, head_dim 128",
    ]


def test_pairs_take_the_order_of_the_one_that_knows_one() -> None:
    spec = make_spec(4, 2, 128)
    backend, _ = make_backend(spec)
    pair = HybridBackend(torch_backend(), backend)
    assert (pair.name, pair.kv_order) == ("torch,cake", "NHD")
    case = make_case(spec, [1, 1, 7], [9, 40, 7], 2, dtype=BF16)
    output, _ = pair.forward(case.q, case.layer_kv, pair.plan(case.batch), spec)
    torch.testing.assert_close(output.double(), dense_attention(case, spec)[0], rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="cake: it plans decodes only, not 1 chunks"):
        backend.plan(case.batch)


def on_blackwell(**change: Any) -> AttentionProblem:
    return dataclasses.replace(make_problem("cuda", BF16, head_dim=128), **({"capability": BLACKWELL} | change))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, CakeBlackwellBackend),
        ({"capability": (10, 3)}, CakeBlackwellBackend),
        ({"capability": (9, 0)}, CakeBackend),
        ({"capability": (12, 0)}, CakeBackend),
        ({"cake_variants": ("decode-16-d128",)}, CakeBackend),
        ({"page_size": 32}, CakeBackend),
        ({"kinds": make_problem("cuda", BF16, head_dim=64).kinds}, CakeBackend),
    ],
)
def test_which_family_serves_the_name(change: dict[str, Any], expected: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cake_backend, "cake_fmha_refusal", lambda: None)
    assert CakeBackend.implementation(on_blackwell(**change)) is expected
    monkeypatch.setattr(cake_backend, "cake_fmha_refusal", lambda: "flashinfer-python 0.7.3 is older than 0.7.4")
    assert CakeBackend.implementation(on_blackwell(**change)) is CakeBackend


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.7.3", "flashinfer-python 0.7.3 is older than 0.7.4"),
        ("0.6.13", "flashinfer-python 0.6.13 is older than 0.7.4"),
        ("0.7.4", None),
        ("0.7.4.post1", None),
        ("0.10.0", None),
        ("1.0", None),
    ],
)
def test_versions_of_flashinfer(version: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "flash_infer_refusal", lambda: None)
    monkeypatch.setattr(installed.metadata, "version", lambda name: version)
    assert installed.cake_fmha_refusal() == expected


REFUSALS: list[tuple[dict[str, Any], Phase, str]] = [
    ({"device_type": "cpu"}, "decode", "CUDA device only, not on cpu"),
    ({"capability": (9, 0)}, "decode", "for compute capability 10.0 and 10.3"),
    ({}, "prefill", "used for decodes only"),
    ({"dtype": torch.float32, "kv_dtype": torch.float32}, "decode", "float16 and bfloat16, not in float32"),
    ({"kv_dtype": torch.float16}, "decode", "does not read float16 with queries in bfloat16"),
    ({"has_head_scales": True}, "decode", "one scale for all KV heads"),
    ({"page_size": 32}, "decode", "page_size 16 for head_dim 128, not 32"),
    ({"kinds": make_problem(softcap=30.0).kinds}, "decode", "does not cap scores"),
    ({"kinds": make_problem(head_dim=64).kinds}, "decode", "head_dim 128, 256, not 64"),
]


@pytest.mark.parametrize(("change", "phase", "words"), REFUSALS)
def test_refusals(change: dict[str, Any], phase: Phase, words: str) -> None:
    assert CakeBlackwellBackend.refuse(on_blackwell(), "decode") is None
    assert words in str(CakeBlackwellBackend.refuse(on_blackwell(**change), phase))
