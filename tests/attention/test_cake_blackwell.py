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
from torch import Tensor

from aserve.attention import cake_backend, cake_blackwell, installed
from aserve.attention.base import AttentionProblem, AttentionSpec, CaptureShape, KVOrder, LayerKV
from aserve.attention.cake_backend import CakeBackend
from aserve.attention.cake_blackwell import BlackwellDecodes, refuse_flash_infer_cake
from aserve.attention.cake_decodes import CakeDecodes
from aserve.attention.hybrid import HybridBackend

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CPU = torch.device("cpu")
BLACKWELL = (10, 0)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedCakeFmha:
    """FlashInfer is there."""
    played = PlayedCakeFmha()

    class Decodes(BlackwellDecodes):
        def __init__(self, problem: AttentionProblem, device: torch.device) -> None:
            super().__init__(problem, device, decode=played.decode, select_route=played.select_route)

    monkeypatch.setattr(cake_backend, "BlackwellDecodes", Decodes)
    monkeypatch.setattr(cake_blackwell, "cake_fmha_refusal", lambda: None)
    return played


def make_backend(spec: AttentionSpec, kv_dtype: torch.dtype = BF16) -> CakeBackend:
    problem = AttentionProblem("cuda", BF16, kv_dtype, 16, (spec.kind,), BLACKWELL, max_num_seqs=8)
    return CakeBackend(problem, CPU)


def make_step(
    spec: AttentionSpec,
    key_lens: list[int],
    query_lens: list[int] | None = None,
    order: KVOrder = "HND",
    **options: Any,
) -> PagedCase:
    """Decodes first, then chunks, over pages in ``order``."""
    query_lens = query_lens or [1] * len(key_lens)
    case = make_case(spec, query_lens, key_lens, query_lens.count(1), dtype=BF16, **options)
    if order == "NHD":
        return case
    pool = case.layer_kv
    key, value = (pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (pool.key, pool.value))
    return dataclasses.replace(case, layer_kv=LayerKV(key, value, pool.key_scale, pool.value_scale))


def check(output: Tensor, lse: Tensor | None, case: PagedCase, spec: AttentionSpec) -> None:
    expected, expected_lse = dense_attention(case, spec)
    torch.testing.assert_close(output[: len(expected)].double(), expected, rtol=2e-2, atol=2e-2)
    if lse is not None:
        torch.testing.assert_close(lse[: len(expected)].double(), expected_lse, rtol=1e-3, atol=1e-3)


SINKS = torch.tensor([-1.0, 0.0, 2.0, 0.5])


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("option", [{}, {"sliding_window": 5}, {"sinks": SINKS}], ids=["plain", "window", "sinks"])
def test_eager_decodes(option: dict[str, Any], order: KVOrder, played: PlayedCakeFmha) -> None:
    spec = make_spec(4, 2, 128, **option)
    backend = make_backend(spec)
    assert backend.kv_order == "HND"
    case = make_step(spec, [9, 40, 16], order=order)
    wide = torch.zeros(3, 8, 128, dtype=BF16)
    wide[:, :4] = case.q
    check(*backend.forward(wide[:, :4], case.layer_kv, backend.plan(case.batch), spec, return_lse=True), case, spec)
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec)
    assert lse is None
    check(output, None, case, spec)
    assert len(played.calls) == 2


def test_8_bit_pages_and_their_scales(played: PlayedCakeFmha) -> None:
    spec = make_spec(4, 2, 128)
    backend = make_backend(spec, kv_dtype=FP8)
    case = make_step(spec, [33, 7], kv_dtype=FP8, scales=(0.25, 0.5), order="NHD")
    check(*backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec), case, spec)
    assert len(played.calls) == 1


def test_chunks_stay_with_the_own_family(played: PlayedCakeFmha) -> None:
    spec = make_spec(4, 2, 128)
    backend = make_backend(spec)
    case = make_step(spec, [9, 40, 7, 33], [1, 1, 7, 20])
    plan = backend.plan(case.batch)
    check(*backend.forward(case.q, case.layer_kv, plan, spec, return_lse=True), case, spec)
    (call,) = played.calls
    assert len(call["query"]) == 2
    assert backend.kernel_name(plan, spec) == "decode_native_bf16, prefill-16-d128"


def test_captured_decodes_keep_their_addresses_and_their_route(played: PlayedCakeFmha) -> None:
    spec = make_spec(8, 1, 128)
    backend = make_backend(spec)
    captured = CapturedCase.make(CaptureShape(5, 5, 0), 6, 16)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    assert backend.kernel_name(plan, spec) == "", "not before it has run"
    for seed, key_lens in enumerate(([9, 40, 16, 90, 1], [3], [33, 64])):
        count = len(key_lens)
        case = make_step(spec, key_lens, seed=seed)
        backend.prepare_replay(plan, captured.fill(case, dummy_page=int(case.batch.page_table[0, 0])))
        backend.convert(plan)
        q = torch.cat((case.q, case.q.new_zeros(5 - count, 8, 128)))
        check(*backend.forward(q, case.layer_kv, plan, spec, out=torch.full_like(q, torch.nan)), case, spec)
    for name in ("block_tables", "seq_lens", "workspace_buffer", "multi_ctas_kv_counter_buffer"):
        assert len({call[name].data_ptr() for call in played.calls}) == 1
    assert {call["max_seq_len"] for call in played.calls} == {96}, "of the table, whatever the step"
    assert len(played.asked) == 1
    assert backend.kernel_name(plan, spec) == "decode_aligned_bf16 ALIGNED_C8_BF16"


def test_a_plan_that_has_not_run_is_not_captured(played: PlayedCakeFmha, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(4, 2, 128)
    backend = make_backend(spec)
    case = make_step(spec, [9, 40])
    plan = backend.plan(case.batch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(backend._decodes, "_device", torch.device("cuda"))
        with pytest.raises(RuntimeError, match="cake: a plan must run once before it is captured"):
            backend.forward(case.q, case.layer_kv, plan, spec)
    backend.forward(case.q, case.layer_kv, plan, spec)
    monkeypatch.setattr(backend._decodes, "_device", torch.device("cuda"))
    backend.forward(case.q, case.layer_kv, plan, spec)
    assert len(played.calls) == 2


@pytest.mark.usefixtures("played")
def test_the_route_is_logged_once_for_each_size(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aserve.attention.cake_blackwell")
    for spec in (make_spec(4, 2, 128), make_spec(9, 1, 128)):
        backend = make_backend(spec)
        for key_lens in ([9, 40], [7, 3, 33], [33, 4]):
            case = make_step(spec, key_lens)
            backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec)
    assert [record.getMessage() for record in caplog.records if "FlashInfer" in record.getMessage()] == [
        "cake: FlashInfer's decode_native_bf16 for 2 sequences of up to 48 keys, head_dim 128",
        "cake: FlashInfer's decode_native_bf16 for 3 sequences of up to 48 keys, head_dim 128",
        "cake: FlashInfer's compatibility kernel for 2 sequences of up to 48 keys, head_dim 128",
        "cake: FlashInfer's compatibility kernel for 3 sequences of up to 48 keys, head_dim 128",
    ]


@pytest.mark.usefixtures("played")
def test_pairs_take_the_order_of_the_one_that_knows_one() -> None:
    spec = make_spec(4, 2, 128)
    pair = HybridBackend(torch_backend(), make_backend(spec))
    assert (pair.name, pair.kv_order) == ("torch,cake", "NHD")
    case = make_step(spec, [9, 40, 7], [1, 1, 7], order="NHD")
    check(*pair.forward(case.q, case.layer_kv, pair.plan(case.batch), spec), case, spec)


def on_blackwell(**change: Any) -> AttentionProblem:
    return dataclasses.replace(make_problem("cuda", BF16, head_dim=128), **({"capability": BLACKWELL} | change))


def decodes_of(problem: AttentionProblem) -> object:
    return CakeBackend(problem, CPU, ("decode",))._decodes


@pytest.mark.usefixtures("played")
def test_which_family_serves_decodes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for capability in ((10, 0), (10, 3)):
        assert isinstance(decodes_of(on_blackwell(capability=capability)), BlackwellDecodes)
    assert isinstance(decodes_of(on_blackwell(capability=(9, 0))), CakeDecodes)
    assert "FlashInfer" not in caplog.text
    assert isinstance(decodes_of(on_blackwell(page_size=32)), CakeDecodes)
    told = "own kernels for decodes instead of FlashInfer's (it needs page_size 16 for head_dim 128, not 32)"
    assert told in caplog.text
    reason = "flashinfer-python 0.7.3 is older than 0.7.4"
    monkeypatch.setattr(cake_blackwell, "cake_fmha_refusal", lambda: reason)
    assert isinstance(decodes_of(on_blackwell()), CakeDecodes)
    assert f"instead of FlashInfer's ({reason})" in caplog.text


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


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"capability": (9, 0)}, "for compute capability 10.0 and 10.3"),
    ({"cake_variants": ("decode-16-d128",)}, "variants of the own family are pinned"),
    ({"dtype": torch.float32, "kv_dtype": torch.float32}, "float16 and bfloat16, not in float32"),
    ({"kv_dtype": torch.float16}, "does not read float16 with queries in bfloat16"),
    ({"has_head_scales": True}, "one scale for all KV heads"),
    ({"page_size": 32}, "page_size 16 for head_dim 128, not 32"),
    ({"kinds": make_problem(softcap=30.0).kinds}, "does not cap scores"),
    ({"kinds": make_problem(head_dim=64).kinds}, "head_dim 128, 256, not 64"),
]


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(("change", "words"), REFUSALS)
def test_refusals(change: dict[str, Any], words: str) -> None:
    assert refuse_flash_infer_cake(on_blackwell()) is None
    assert words in str(refuse_flash_infer_cake(on_blackwell(**change)))
