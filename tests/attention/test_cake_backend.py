"""The project's own kernels behind the backend's interface: on a GPU, or on the CPU under the interpreter."""

import dataclasses
import logging
import math
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

from aserve.attention.base import (
    PHASES,
    AttentionBackend,
    AttentionBatch,
    AttentionProblem,
    AttentionSpec,
    CaptureShape,
    KVOrder,
    LayerKV,
    LseBase,
    Phase,
)
from aserve.attention.cake_backend import CakeBackend
from aserve.attention.hybrid import HybridBackend
from aserve.attention.torch_backend import TorchBackend
from aserve.kernels.nvfp4 import NVFP4, BlockScales

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_backend(
    *specs: AttentionSpec,
    kv_dtype: torch.dtype = BF16,
    phases: tuple[Phase, ...] = PHASES,
    max_drafts: int = 0,
) -> CakeBackend:
    kinds = tuple(spec.kind for spec in specs)
    problem = AttentionProblem("cuda", BF16, kv_dtype, 16, kinds, (9, 0), max_drafts=max_drafts, max_num_seqs=8)
    return CakeBackend(problem, torch.device(DEVICE), phases)


def mixed(spec: AttentionSpec, decode_lens: list[int], chunk_lens: list[tuple[int, int]], **options: Any) -> PagedCase:
    """Decodes of so many keys, then chunks of so many queries and keys."""
    query_lens = [1] * len(decode_lens) + [queries for queries, _ in chunk_lens]
    key_lens = decode_lens + [keys for _, keys in chunk_lens]
    return make_case(spec, query_lens, key_lens, len(decode_lens), dtype=BF16, device=DEVICE, **options)


def decodes(spec: AttentionSpec, key_lens: list[int], **options: Any) -> PagedCase:
    return make_case(spec, [1] * len(key_lens), key_lens, len(key_lens), dtype=BF16, device=DEVICE, **options)


class BaseTwoBackend(AttentionBackend):
    """The oracle, with log-sum-exps in base 2."""

    name = "base 2"
    lse_base: LseBase = "2"

    def __init__(self, oracle: TorchBackend) -> None:
        super().__init__(oracle.problem, oracle.device)
        self._oracle = oracle

    def plan(self, batch: AttentionBatch) -> Any:
        return self._oracle.plan(batch)

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: Any,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        output, lse = self._oracle.forward(q, layer_kv, plan, spec, return_lse=return_lse, out=out)
        return output, None if lse is None else lse / math.log(2)


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


@pytest.mark.parametrize(
    ("head_dim", "option"),
    [
        (264, {}),
        (80, {"sliding_window": 40, "softcap": 5.0}),
        (64, {"sinks": torch.tensor([1.0, 0.0, -1.0, 4.0], device=DEVICE)}),
    ],
    ids=["plain", "window and cap", "sinks"],
)
def test_eager_mixed_steps(head_dim: int, option: dict[str, Any]) -> None:
    """Beside dense attention also beside the torch backend, which speaks the same base."""
    spec = make_spec(4, 2, head_dim, **option)
    backend, oracle = make_backend(spec), torch_backend(DEVICE)
    case = mixed(spec, [1, 90], [(7, 70), (1, 1), (66, 70)] if head_dim <= 256 else [(10, 33), (1, 1)])
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    check(output, lse, case, spec)
    expected, expected_lse = oracle.forward(case.q, case.layer_kv, oracle.plan(case.batch), spec, return_lse=True)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


def test_chunks_alone() -> None:
    spec = make_spec(4, 2, 64)
    backend = make_backend(spec)
    case = mixed(spec, [], [(40, 75), (16, 16)])
    check(*backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True), case, spec)


def lay_head_first(layer_kv: LayerKV) -> LayerKV:
    """Return the same pages in memory where a head's tokens lie together."""

    def turn(pages: Tensor) -> Tensor:
        return pages.transpose(1, 2).contiguous().transpose(1, 2)

    blocks = layer_kv.block_scales
    turned = None if blocks is None else BlockScales(turn(blocks.key), turn(blocks.value))
    return dataclasses.replace(layer_kv, key=turn(layer_kv.key), value=turn(layer_kv.value), block_scales=turned)


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("kv_dtype", [FP8, NVFP4], ids=["fp8", "nvfp4"])
def test_pages_of_few_bits(kv_dtype: torch.dtype, order: KVOrder) -> None:
    """Alone the backend has a head's tokens together; in a pair it reads what the other one reads."""
    spec = make_spec(4, 2, 64)
    case = mixed(spec, [128, 40], [(20, 50)], kv_dtype=kv_dtype, scales=(0.25, 0.5))
    backend = make_backend(spec, kv_dtype=kv_dtype)
    oracle = TorchBackend(backend.problem, backend.device)
    assert backend.kv_order == "HND"
    assert [HybridBackend(*pair).kv_order for pair in ((backend, oracle), (oracle, backend))] == ["NHD", "NHD"]
    layer_kv = lay_head_first(case.layer_kv) if order == "HND" else case.layer_kv
    check(*backend.forward(case.q, layer_kv, backend.plan(case.batch), spec, return_lse=True), case, spec)


def test_pages_of_16_bits_have_the_heads_of_a_token_together() -> None:
    assert make_backend(make_spec(4, 2, 64)).kv_order == "NHD"


def test_layers_of_two_kinds_share_a_step() -> None:
    """Of groups of two and four, whose chunks are cut into other tiles."""
    specs = [make_spec(4, 2, 64), make_spec(4, 1, 128, sliding_window=20)]
    backend = make_backend(*specs)
    cases = [mixed(spec, [150, 17], [(30, 45)]) for spec in specs]
    assert torch.equal(*(case.batch.page_table for case in cases))
    plan = backend.plan(cases[0].batch)
    assert plan.chunks is not None
    assert {size.group for size in plan.chunks.tiles} == {2, 4}
    for spec, case in zip(specs, cases, strict=True):
        check(*backend.forward(case.q, case.layer_kv, plan, spec, return_lse=True), case, spec)


def test_captured_decodes_keep_their_addresses() -> None:
    """Each step is shared out anew, whatever the last one left; padding decodes read the dummy page."""
    spec = make_spec(4, 2, 64)
    backend = make_backend(spec)
    captured = CapturedCase.make(CaptureShape(5, 5, 0), 20, 16, DEVICE)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    assert plan.decodes is not None
    assert plan.chunks is None
    (schedule,) = plan.decodes.schedules.values()
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


MIXED_STEPS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([9, 130, 16], [(20, 33), (1, 1), (12, 70)]),
    ([3], []),
    ([], [(40, 90)]),
    ([40, 7, 18, 33], [(2, 2), (30, 30), (4, 60)]),
]


def test_captured_mixed_steps_keep_their_addresses() -> None:
    """Steps of all sizes in tables and tiles that others have filled; padding leaves its tokens alone."""
    spec = make_spec(4, 2, 64)
    backend = make_backend(spec)
    assert backend.captures_decodes
    assert backend.captures_chunks
    captured = CapturedCase.make(CaptureShape(40, 4, 3), 20, 16, DEVICE)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    assert plan.decodes is not None
    assert plan.chunks is not None
    (schedule,), (tiles,) = plan.decodes.schedules.values(), plan.chunks.tiles.values()
    tensors = (schedule.starts, schedule.first_seqs, tiles.chunks, tiles.first_rows)
    addresses = [tensor.data_ptr() for tensor in tensors]
    for seed, (decode_lens, chunk_lens) in enumerate(MIXED_STEPS):
        case = mixed(spec, decode_lens, chunk_lens, seed=seed)
        backend.prepare_replay(plan, captured.fill(case, dummy_page=int(case.batch.page_table[0, 0])))
        backend.convert(plan)
        q = torch.cat((case.q, case.q.new_zeros(40 - len(case.q), 4, 64)))
        out = torch.full_like(q, torch.nan)
        output, lse = backend.forward(q, case.layer_kv, plan, spec, return_lse=True, out=out)
        assert output is out
        check(output, lse, case, spec)
        assert output[max(len(case.q), 4) :].isnan().all(), "tokens of no sequence are left alone"
        assert [tensor.data_ptr() for tensor in tensors] == addresses


DRAFT_STEPS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([9], [(4, 150), (20, 33), (3, 60)]),
    ([40, 7], [(5, 40), (1, 17)]),
    ([3], []),
]


def test_chunks_that_verify_drafts_are_computed_with_their_keys_split() -> None:
    """Each chunk by one kernel: those of up to four queries by the one for drafts, whatever stands beside them."""
    spec = make_spec(4, 2, 64, sliding_window=50)
    backend = make_backend(spec, max_drafts=3)
    captured = CapturedCase.make(CaptureShape(40, 4, 3), 20, 16, DEVICE)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    assert plan.decodes is not None
    assert plan.chunks is not None
    assert plan.chunks.drafts is not None
    assert [schedule.max_queries for schedule in plan.chunks.drafts.schedules.values()] == [4]
    assert backend.kernel_name(plan, spec).split(", ")[1:] == ["several-16-d64", "prefill-16-d64"]
    for seed, (decode_lens, chunk_lens) in enumerate(DRAFT_STEPS):
        case = mixed(spec, decode_lens, chunk_lens, seed=seed)
        backend.prepare_replay(plan, captured.fill(case, dummy_page=int(case.batch.page_table[0, 0])))
        backend.convert(plan)
        q = torch.cat((case.q, case.q.new_zeros(40 - len(case.q), 4, 64)))
        check(*backend.forward(q, case.layer_kv, plan, spec, return_lse=True), case, spec)
        (tiles,) = plan.chunks.tiles.values()
        tiled = {chunk_lens[chunk][0] for chunk in tiles.chunks.tolist() if chunk >= 0}
        assert tiled == {queries for queries, _ in chunk_lens if queries > 4}


def test_drafts_of_layers_that_no_variant_serves_are_computed_as_all_chunks() -> None:
    spec = make_spec(4, 2, 72)
    backend = make_backend(spec, max_drafts=3)
    case = mixed(spec, [9], [(4, 50), (20, 33)])
    plan = backend.plan(case.batch)
    assert plan.chunks is not None
    assert plan.chunks.drafts is not None
    assert not plan.chunks.drafts.variants
    check(*backend.forward(case.q, case.layer_kv, plan, spec, return_lse=True), case, spec)


def test_dirty_workspaces_do_not_show() -> None:
    spec = make_spec(4, 2, 64)
    backend = make_backend(spec)
    assert backend._decodes is not None
    backend._decodes._partials.outs.fill_(torch.nan)
    backend._decodes._partials.lses.fill_(torch.nan)
    case = decodes(spec, [700, 1])
    check(*backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True), case, spec)


@pytest.mark.parametrize("phase", PHASES)
def test_halves_of_a_pair(phase: Phase) -> None:
    """The other half speaks base 2, as FlashInfer does; each converts at the border."""
    spec = make_spec(4, 2, 64)
    half, other = make_backend(spec, phases=(phase,)), BaseTwoBackend(torch_backend(DEVICE))
    pair = HybridBackend(half, other) if phase == "prefill" else HybridBackend(other, half)
    assert pair.name == ("cake,base 2" if phase == "prefill" else "base 2,cake")
    case = mixed(spec, [9, 140], [(7, 7), (20, 33)])
    check(*pair.forward(case.q, case.layer_kv, pair.plan(case.batch), spec, return_lse=True), case, spec)


def test_a_captured_pair_of_halves() -> None:
    """Decodes of one and chunks of the other: the chunks' log-sum-exps do not replace those of decodes."""
    spec = make_spec(4, 2, 64)
    pair = HybridBackend(make_backend(spec, phases=("prefill",)), make_backend(spec, phases=("decode",)))
    assert pair.captures_decodes
    assert pair.captures_chunks
    captured = CapturedCase.make(CaptureShape(40, 4, 3), 20, 16, DEVICE)
    plan = pair.prepare_capture(captured.shape, captured.tables)
    for seed, (decode_lens, chunk_lens) in enumerate(MIXED_STEPS[:2]):
        case = mixed(spec, decode_lens, chunk_lens, seed=seed)
        pair.prepare_replay(plan, captured.fill(case, dummy_page=int(case.batch.page_table[0, 0])))
        pair.convert(plan)
        q = torch.cat((case.q, case.q.new_zeros(40 - len(case.q), 4, 64)))
        check(*pair.forward(q, case.layer_kv, plan, spec, return_lse=True), case, spec)


def test_a_half_plans_nothing_else() -> None:
    spec = make_spec(4, 2, 64)
    case = mixed(spec, [9], [(7, 7)])
    refusals: dict[Phase, str] = {
        "decode": "cake: it was built for decodes only, not for 1 chunks",
        "prefill": "cake: it was built for chunks only, not for 1 decodes",
    }
    for phase, words in refusals.items():
        half = make_backend(spec, phases=(phase,))
        assert (half.captures_decodes, half.captures_chunks) == (phase == "decode", phase == "prefill")
        with pytest.raises(ValueError, match=words):
            half.plan(case.batch)


def test_the_choice_is_logged_with_its_reasons(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make_backend(make_spec(4, 2, 128), make_spec(4, 2, 72))
    first, second, third, fourth = (record.getMessage() for record in caplog.records)
    assert first == (
        "cake: decode-16-d128 for head_dim 128, up to 8 sequences (decode-16-d64-short, decode-16-d64: it knows "
        "head_dim 64, not 128; decode-16-d128-short: it serves queries that see 128 keys at most, not 8192)"
    )
    assert second.startswith(
        "cake: decode-plain for head_dim 72, up to 8 sequences (decode-16-d64-short, decode-16-d64: it knows head_dim "
    )
    assert (
        third == "cake: prefill-16-d128 for chunks, head_dim 128 (prefill-16-d64: it knows head_dim 1 to 64, not 128)"
    )
    assert fourth == "cake: prefill-16-d128 for chunks, head_dim 72 (prefill-16-d64: it knows head_dim 1 to 64, not 72)"


REFUSALS: list[tuple[dict[str, Any], Phase, str]] = [
    ({"device_type": "cpu"}, "decode", "CUDA device only, not on cpu"),
    ({"capability": (7, 5)}, "decode", "compute capability 8.0 or more, not 7.5"),
    ({"capability": (13, 0)}, "decode", "it has no launches for compute capability 13.0, only for 8.0, 8.6"),
    ({"kv_dtype": FP8, "capability": (8, 0)}, "prefill", "float8_e4m3fn needs a GPU of compute capability 8.9 or more"),
    ({"cake_variants": ("prefill-8-d64",)}, "prefill", "prefill-8-d64 is pinned: it does not read bfloat16"),
    ({"page_size": 512}, "decode", "page_size up to 256, not 512"),
    ({"kv_dtype": torch.float16}, "decode", "does not read float16 with queries in bfloat16"),
    ({"kv_dtype": FP8, "capability": (8, 0)}, "decode", "float8_e4m3fn needs a GPU of compute capability 8.9 or more"),
]


@pytest.mark.parametrize(("change", "phase", "words"), REFUSALS)
def test_refusals(change: dict[str, Any], phase: Phase, words: str) -> None:
    problem = dataclasses.replace(make_problem("cuda", BF16), capability=(9, 0))
    assert CakeBackend.refuse(problem, phase) is None
    assert words in str(CakeBackend.refuse(dataclasses.replace(problem, **change), phase))


def test_a_kind_that_no_variant_serves_is_refused() -> None:
    problem = dataclasses.replace(make_problem("cuda", BF16, head_dim=576), capability=(9, 0))
    for phase in PHASES:
        assert CakeBackend.refuse(problem, phase) == "it knows head_dim 1 to 512, not 576"
        with pytest.raises(ValueError, match="no variant serves"):
            CakeBackend(problem, torch.device("cpu"), (phase,))
