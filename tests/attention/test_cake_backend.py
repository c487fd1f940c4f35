"""The project's own decode kernels behind the backend's interface: on a GPU, or on the CPU under the interpreter."""

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
from torch import Tensor

from aserve.attention.base import AttentionProblem, AttentionSpec, CaptureShape, Phase
from aserve.attention.cake_backend import CakeBackend
from aserve.attention.hybrid import HybridBackend

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_backend(*specs: AttentionSpec, kv_dtype: torch.dtype = BF16) -> CakeBackend:
    problem = AttentionProblem("cuda", BF16, kv_dtype, 16, tuple(spec.kind for spec in specs), (9, 0), max_num_seqs=8)
    return CakeBackend(problem, torch.device(DEVICE))


def decodes(spec: AttentionSpec, key_lens: list[int], **options: Any) -> PagedCase:
    return make_case(spec, [1] * len(key_lens), key_lens, len(key_lens), dtype=BF16, device=DEVICE, **options)


def check(output: Tensor, lse: Tensor | None, case: PagedCase, spec: AttentionSpec) -> None:
    expected, expected_lse = dense_attention(case, spec)
    torch.testing.assert_close(output[: len(expected)].double().cpu(), expected, rtol=2e-2, atol=2e-2)
    assert lse is not None
    torch.testing.assert_close(lse[: len(expected)].double().cpu(), expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("head_dim", "option"),
    [
        (64, {}),
        (72, {}),
        (64, {"sliding_window": 40, "softcap": 5.0}),
        (64, {"sinks": torch.tensor([1.0, 0.0, -1.0, 4.0], device=DEVICE)}),
    ],
    ids=["split", "plain", "window and cap", "sinks"],
)
def test_eager_decodes(head_dim: int, option: dict[str, Any]) -> None:
    spec = make_spec(4, 2, head_dim, **option)
    backend = make_backend(spec)
    case = decodes(spec, [1, 300, 17])
    plan = backend.plan(case.batch)
    backend.convert(plan)
    output, lse = backend.forward(case.q, case.layer_kv, plan, spec, return_lse=True)
    check(output, lse, case, spec)
    given = torch.full_like(case.q, torch.nan)
    output, lse = backend.forward(case.q, case.layer_kv, plan, spec, out=given)
    assert output is given
    assert lse is None
    torch.testing.assert_close(output.double().cpu(), dense_attention(case, spec)[0], rtol=2e-2, atol=2e-2)


def test_8_bit_pages() -> None:
    spec = make_spec(4, 2, 64)
    case = decodes(spec, [128, 40], kv_dtype=FP8, scales=(0.25, 0.5))
    backend = make_backend(spec, kv_dtype=FP8)
    check(*backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True), case, spec)


def test_layers_of_two_kinds_share_a_step() -> None:
    specs = [make_spec(4, 2, 64), make_spec(4, 1, 128, sliding_window=20)]
    backend = make_backend(*specs)
    cases = [decodes(spec, [150, 17]) for spec in specs]
    plan = backend.plan(cases[0].batch)
    for spec, case in zip(specs, cases, strict=True):
        plan = dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, page_table=case.batch.page_table))
        check(*backend.forward(case.q, case.layer_kv, plan, spec, return_lse=True), case, spec)


def test_captured_decodes_keep_their_addresses_and_count_their_memory() -> None:
    """Each step is shared out anew, whatever the last one left; padding decodes read the dummy page."""
    spec = make_spec(4, 2, 64)
    backend = make_backend(spec)
    assert backend.captures_decodes
    assert not backend.captures_chunks
    before = backend.workspace_bytes
    captured = CapturedCase.make(CaptureShape(5, 5, 0), 20, 16, DEVICE)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    (schedule,) = plan.schedules.values()
    assert backend.workspace_bytes - before == 4 * (5 + 1 + len(schedule.first_seqs))
    addresses = (schedule.starts.data_ptr(), schedule.first_seqs.data_ptr())
    for seed, key_lens in enumerate(([9, 300, 16, 90, 1], [3], [129, 64])):
        count = len(key_lens)
        case = decodes(spec, key_lens, seed=seed)
        backend.prepare_replay(plan, captured.fill(case, dummy_page=int(case.batch.page_table[0, 0])))
        backend.convert(plan)
        q = torch.cat((case.q, case.q.new_zeros(5 - count, 4, 64)))
        output, lse = backend.forward(q, case.layer_kv, plan, spec, return_lse=True)
        check(output, lse, case, spec)
        assert (schedule.starts.data_ptr(), schedule.first_seqs.data_ptr()) == addresses
    with pytest.raises(ValueError, match="only batches of decodes are captured"):
        backend.prepare_capture(CaptureShape(5, 4, 1), captured.tables)


def test_dirty_workspaces_do_not_show() -> None:
    spec = make_spec(4, 2, 64)
    backend = make_backend(spec)
    backend._partials.outs.fill_(torch.nan)
    backend._partials.lses.fill_(torch.nan)
    case = decodes(spec, [700, 1])
    check(*backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True), case, spec)


def test_the_half_of_a_pair_that_decodes() -> None:
    spec = make_spec(4, 2, 64)
    pair = HybridBackend(torch_backend(DEVICE), make_backend(spec))
    assert pair.name == "torch,cake"
    case = make_case(spec, [1, 1, 7, 20], [9, 140, 7, 33], 2, dtype=BF16, device=DEVICE)
    check(*pair.forward(case.q, case.layer_kv, pair.plan(case.batch), spec, return_lse=True), case, spec)


def test_the_choice_is_logged_with_its_reasons(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make_backend(make_spec(4, 2, 128), make_spec(4, 2, 80))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "cake: decode-16-d128 for head_dim 128, up to 8 sequences (decode-16-d64-short, decode-16-d64: it knows "
        "head_dim 64, not 128; decode-16-d128-short: it serves queries that see 128 keys at most, not 8192)"
    )
    assert second.startswith(
        "cake: decode-plain for head_dim 80, up to 8 sequences (decode-16-d64-short, decode-16-d64: it knows head_dim "
    )


def test_chunks_are_not_planned() -> None:
    spec = make_spec(4, 2, 64)
    case = make_case(spec, [1, 7], [9, 7], 1, dtype=BF16, device=DEVICE)
    with pytest.raises(ValueError, match="cake: it plans decodes only, not 1 chunks"):
        make_backend(spec).plan(case.batch)


REFUSALS: list[tuple[dict[str, Any], Phase, str]] = [
    ({"device_type": "cpu"}, "decode", "CUDA device only, not on cpu"),
    ({"capability": (7, 5)}, "decode", "compute capability 8.0 or more, not 7.5"),
    ({"capability": (13, 0)}, "decode", "it has no launches for compute capability 13.0, only for 8.0, 8.6"),
    ({}, "prefill", "it has kernels for decodes only"),
    ({"page_size": 512}, "decode", "page_size up to 256, not 512"),
    ({"kv_dtype": torch.float16}, "decode", "does not read float16 with queries in bfloat16"),
    ({"kv_dtype": FP8, "capability": (8, 0)}, "decode", "float8_e4m3fn needs a GPU of compute capability 8.9 or more"),
]


@pytest.mark.parametrize(("change", "phase", "words"), REFUSALS)
def test_refusals(change: dict[str, Any], phase: Phase, words: str) -> None:
    problem = dataclasses.replace(make_problem("cuda", BF16), capability=(9, 0))
    assert CakeBackend.refuse(problem, "decode") is None
    assert words in str(CakeBackend.refuse(dataclasses.replace(problem, **change), phase))


def test_a_kind_that_no_variant_serves_is_refused() -> None:
    problem = dataclasses.replace(make_problem("cuda", BF16, head_dim=576), capability=(9, 0))
    assert CakeBackend.refuse(problem, "decode") == "it knows head_dim 1 to 512, not 576"
    with pytest.raises(ValueError, match="no variant serves"):
        CakeBackend(problem, torch.device("cpu"))
