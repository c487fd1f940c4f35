"""What is planned and told to FlashInfer's kernels, played on the CPU, against dense attention."""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles_attention import CapturedCase, PagedCase, dense_attention, make_case, make_problem, make_spec
from doubles_flash_infer import CopyQueue, PlayedKernel, played_ring

from aserve.attention import flash_infer_kernels
from aserve.attention.base import AttentionKind, AttentionProblem, AttentionSpec, CaptureShape, Phase
from aserve.attention.flash_infer_backend import FlashInferBackend
from aserve.attention.flash_infer_kernels import CudaCoreKernel, TensorCoreKernel, load_kernel
from aserve.attention.merge import convert_lse
from aserve.attention.staging_ring import StagingRing
from aserve.errors import ConfigError

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def make_backend(*specs: AttentionSpec, queue: CopyQueue | None = None, **options: Any) -> FlashInferBackend:
    queue = queue or CopyQueue()
    problem = AttentionProblem(
        "cuda", BF16, BF16, 16, tuple(spec.kind for spec in specs), (9, 0), max_num_seqs=8, max_num_tokens=64
    )

    def load(phase: Phase, kind: AttentionKind, problem: AttentionProblem) -> PlayedKernel:
        one_row_a_seq = phase == "decode" and kind.num_heads // kind.num_kv_heads < 4
        return PlayedKernel(kind, problem, queue, one_row_a_seq=one_row_a_seq)

    return FlashInferBackend(problem, CPU, load=load, new_ring=played_ring(queue), **options)


def kernel_of(backend: FlashInferBackend, phase: Phase, spec: AttentionSpec) -> PlayedKernel:
    kernel = backend.planner.kernels[phase, spec.kind]
    assert isinstance(kernel, PlayedKernel)
    return kernel


def check(output: torch.Tensor, lse: torch.Tensor | None, case: PagedCase, spec: AttentionSpec) -> None:
    expected, expected_lse = dense_attention(case, spec)
    torch.testing.assert_close(output[: len(expected)].double(), expected, rtol=1e-2, atol=1e-2)
    assert lse is not None
    natural = convert_lse(lse[: len(expected)], FlashInferBackend.lse_base, "e")
    torch.testing.assert_close(natural.double(), expected_lse, rtol=1e-3, atol=1e-3)


WIDE, PLAIN = make_spec(8, 2, 64), make_spec(4, 2, 64)
STEPS = [
    ([1, 1, 1], [9, 40, 16], 3),
    ([1], [33], 1),
    ([1, 1, 7, 20], [9, 40, 7, 33], 2),
    ([7, 20], [7, 33], 0),
    ([1, 1, 1, 1, 1], [1, 2, 3, 4, 5], 4),
]


@pytest.mark.parametrize("spec", [WIDE, PLAIN, make_spec(4, 2, 64, sliding_window=5)], ids=["4", "2", "window"])
@pytest.mark.parametrize(("query_lens", "key_lens", "num_decodes"), STEPS)
def test_steps_outside_of_graphs(
    spec: AttentionSpec, query_lens: list[int], key_lens: list[int], num_decodes: int
) -> None:
    backend = make_backend(spec)
    case = make_case(spec, query_lens, key_lens, num_decodes, dtype=BF16)
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    check(output, lse, case, spec)


@pytest.mark.parametrize("spec", [WIDE, PLAIN], ids=["with tensor cores", "without"])
def test_captured_steps_of_all_sizes_over_dirty_buffers(spec: AttentionSpec) -> None:
    """One plan for all: what a replay leaves in tables, lists and workspaces must not show in the next."""
    backend = make_backend(spec)
    captured = CapturedCase.make(CaptureShape(40, 5, 4), 6, 16)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    for seed, (query_lens, key_lens, num_decodes) in enumerate([*STEPS, *reversed(STEPS)]):
        case = make_case(spec, query_lens, key_lens, num_decodes, dtype=BF16, seed=seed)
        q = torch.full((40, spec.num_heads, 64), 0.5, dtype=BF16)
        q[: len(case.q)] = case.q
        dummy_page = int(case.batch.page_table[0, 0])
        backend.prepare_replay(plan, captured.fill(case, dummy_page))
        backend.convert(plan)
        out = torch.full_like(q, torch.nan)
        _, lse = backend.forward(q, case.layer_kv, plan, spec, return_lse=True, out=out)
        check(out, lse, case, spec)
        touched = max(len(case.q), 5) if spec is PLAIN else len(case.q)
        assert out[touched:].isnan().all(), "tokens of no sequence are left alone"


def test_chunks_of_a_captured_pair_leave_the_decodes_alone() -> None:
    backend = make_backend(WIDE, phases=("prefill",))
    captured = CapturedCase.make(CaptureShape(40, 3, 2), 3, 16)
    case = make_case(WIDE, [1, 1, 7, 20], [9, 40, 7, 33], 2, dtype=BF16)
    lens = captured.fill(case, 0)
    plan = backend.prepare_capture(CaptureShape(40, 0, 2), captured.tables.section(3, 5))
    backend.prepare_replay(plan, dataclasses.replace(lens, key_lens=lens.key_lens[3:]))
    backend.convert(plan)
    q = torch.cat((case.q, case.q.new_zeros(11, 8, 64)))
    out = torch.full_like(q, 7.0)
    backend.forward(q, case.layer_kv, plan, WIDE, out=out)
    expected = dense_attention(case, WIDE)[0]
    torch.testing.assert_close(out[2:29].double(), expected[2:], rtol=1e-2, atol=1e-2)
    assert bool((out[:2] == 7.0).all())
    assert bool((out[29:] == 7.0).all())


def test_smaller_captures_share_the_memory_of_larger_ones() -> None:
    backend = make_backend(WIDE)
    large, small = (CapturedCase.make(CaptureShape(size, size, 0), 6, 16) for size in (8, 3))
    plans = [backend.prepare_capture(captured.shape, captured.tables) for captured in (large, small)]
    pages = {plan.sections[0].lists.pages.data_ptr() for plan in plans}
    assert len(pages) == 1


def test_a_plan_that_differs_from_the_captured_one_is_an_error() -> None:
    backend = make_backend(WIDE)
    captured = CapturedCase.make(CaptureShape(4, 4, 0), 6, 16)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    kernel_of(backend, "decode", WIDE).changes_plan = True
    backend.prepare_replay(plan, captured.fill(make_case(WIDE, [1], [9], 1), 0))
    with pytest.raises(RuntimeError, match="a captured plan changed"):
        backend.prepare_replay(plan, captured.fill(make_case(WIDE, [1, 1], [9, 40], 2), 0))


def test_captures_beyond_the_workspaces_are_refused() -> None:
    backend = make_backend(WIDE)
    for shape, words in (
        (CaptureShape(9, 9, 0), "9 tokens of decode are more than its workspaces' 8"),
        (CaptureShape(65, 1, 1), "65 tokens of prefill"),
    ):
        captured = CapturedCase.make(shape, 6, 16)
        with pytest.raises(ValueError, match=words):
            backend.prepare_capture(shape, captured.tables)


def test_grids_of_captured_plans() -> None:
    """A query's heads fill a decode's tile; a tile of chunks is chosen as if one chunk had all tokens."""
    backend = make_backend(WIDE)
    captured = CapturedCase.make(CaptureShape(40, 5, 4), 6, 16)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    backend.prepare_replay(plan, captured.fill(make_case(WIDE, [1, 1, 7, 20], [9, 40, 7, 33], 2), 0))
    (decodes,), (chunks,) = (kernel_of(backend, phase, WIDE).requests for phase in ("decode", "prefill"))
    assert (decodes.num_rows, decodes.splits_keys, decodes.is_captured) == (6, True, True)
    assert decodes.num_rows - len(decodes.query_starts) + 2 == 1  # rows - sequences + 1, the empty one included
    assert (chunks.num_rows, chunks.splits_keys, chunks.is_captured) == (44, False, True)
    assert chunks.num_rows - len(chunks.query_starts) + 2 == 40
    assert decodes.query_starts.tolist() == [0, 0, 1, 2, 2, 2, 2]
    assert decodes.page_starts.tolist() == [0, 0, 1, 4, 5, 6, 7]
    assert chunks.query_starts.tolist() == [0, 2, 9, 29, 29, 29]
    assert chunks.page_starts.tolist() == [0, 0, 1, 4, 4, 4]


def test_each_kind_of_layers_has_a_plan_and_a_workspace_of_its_own() -> None:
    specs = [WIDE, make_spec(8, 2, 64, sliding_window=4), make_spec(6, 2, 64)]
    backend = make_backend(*specs)
    cases = [make_case(spec, [1, 1, 7], [9, 40, 33], 2, dtype=BF16) for spec in specs]
    plan = backend.plan(cases[0].batch)
    for spec, case in zip(specs, cases, strict=True):
        output, lse = backend.forward(case.q, case.layer_kv, plan, spec, return_lse=True)
        check(output, lse, case, spec)
    addresses = {plan.workspace.integers.data_ptr() for section in plan.sections for plan in section.plans.values()}
    assert len(addresses) == 6


def test_scales_of_keys_and_values_are_applied_once() -> None:
    scales = (0.25, 0.5)
    for num_decodes, query_lens in ((2, [1, 1, 7]), (0, [7, 5, 3])):
        case = make_case(WIDE, query_lens, [9, 40, 33], num_decodes, dtype=BF16, scales=scales)
        backend = make_backend(WIDE)
        output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), WIDE, return_lse=True)
        check(output, lse, case, WIDE)


def test_pinned_buffers_are_never_rewritten_before_they_were_copied() -> None:
    """The device is behind by as many steps as there are buffers; each step's plan still arrives as it was made."""
    queue = CopyQueue()
    backend = make_backend(WIDE, queue=queue)
    captured = CapturedCase.make(CaptureShape(4, 4, 0), 6, 16)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    arrived: list[list[int]] = []
    kernel = kernel_of(backend, "decode", WIDE)
    integers = backend.planner.workspaces["decode", WIDE.kind].integers
    for key_len in range(1, 90, 7):
        key_lens = [key_len, 16][: 1 + key_len % 2]  # a plan for as many decodes as before would be kept
        count = len(key_lens)
        backend.prepare_replay(plan, captured.fill(make_case(WIDE, [1] * count, key_lens, count), 0))
        queue.pending.append(lambda: arrived.append(integers[24:48].view(torch.int32).tolist()))
    assert len(queue.pending) <= 2 * 6 + 1
    assert queue.num_waits > 0
    queue.run()
    assert arrived == [request.page_starts.tolist() for request in kernel.requests]


def test_a_plan_without_splits_is_kept_until_another_takes_its_place() -> None:
    """Which block serves which sequence then depends on their number alone."""
    backend = make_backend(WIDE)
    kernel = kernel_of(backend, "decode", WIDE)
    large, small = (CapturedCase.make(CaptureShape(size, size, 0), 6, 16) for size in (4, 2))
    plans = {case.shape: backend.prepare_capture(case.shape, case.tables) for case in (large, small)}
    for case, key_lens, num_planned in (
        (large, [9, 20], 1),
        (large, [10, 21], 1),
        (large, [11, 22, 5], 2),  # one more
        (small, [10, 21], 3),  # another graph
        (large, [11, 22, 5], 4),
    ):
        count = len(key_lens)
        backend.prepare_replay(plans[case.shape], case.fill(make_case(WIDE, [1] * count, key_lens, count), 0))
        assert len(kernel.requests) == num_planned
    backend.plan(make_case(WIDE, [1], [9], 1, dtype=BF16).batch)
    backend.prepare_replay(plans[large.shape], large.fill(make_case(WIDE, [1] * 3, [11, 22, 5], 3), 0))
    assert len(kernel.requests) == 6


def test_a_kept_plan_is_not_taken_for_that_of_a_mixed_step() -> None:
    """As many decodes of as many, but in a graph of its own, where keys may be split."""
    backend = make_backend(WIDE)
    shapes = (CaptureShape(4, 4, 0), CaptureShape(40, 4, 2))
    captured = [CapturedCase.make(shape, 6, 16) for shape in shapes]
    plans = [backend.prepare_capture(each.shape, each.tables) for each in captured]
    assert [plan.sections[0].splits_keys for plan in plans] == [False, True]
    cases = [
        make_case(WIDE, [1, 1], [9, 40], 2, dtype=BF16),
        make_case(WIDE, [1, 1, 7], [90, 16, 33], 2, dtype=BF16),
    ]
    for place in (0, 1, 0, 0, 1, 1):
        case, each, plan = cases[place], captured[place], plans[place]
        backend.prepare_replay(plan, each.fill(case, int(case.batch.page_table[0, 0])))
        backend.convert(plan)
        q = torch.zeros(each.shape.num_tokens, 8, 64, dtype=BF16)
        q[: len(case.q)] = case.q
        output, lse = backend.forward(q, case.layer_kv, plan, WIDE, return_lse=True)
        check(output, lse, case, WIDE)
        assert kernel_of(backend, "decode", WIDE).requests[-1].splits_keys == bool(place)


def test_a_plan_that_splits_keys_unasked_is_kept_until_a_page_is_begun() -> None:
    backend = make_backend(PLAIN)
    kernel = kernel_of(backend, "decode", PLAIN)
    captured = CapturedCase.make(CaptureShape(4, 4, 0), 6, 16)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    assert not plan.sections[0].splits_keys
    for key_lens, num_planned in (([9, 20], 1), ([10, 21], 1), ([16, 32], 1), ([17, 21], 2), ([20, 9], 3)):
        backend.prepare_replay(plan, captured.fill(make_case(PLAIN, [1, 1], key_lens, 2), 0))
        assert len(kernel.requests) == num_planned


def test_two_steps_in_flight_wait_for_nothing() -> None:
    queue = CopyQueue()
    backend = make_backend(WIDE, queue=queue)
    case = make_case(WIDE, [1, 1, 7], [9, 40, 33], 2, dtype=BF16)
    for _ in range(3):
        backend.plan(case.batch)
    assert queue.num_waits == 0
    assert len(queue.pending) == 6


def test_a_ring_lends_its_buffers_in_turn() -> None:
    queue = CopyQueue()
    ring = played_ring(queue)(2, 8)
    assert isinstance(ring, StagingRing)
    addresses = []
    for _ in range(4):
        with ring.borrow() as buffer:
            addresses.append(buffer.data_ptr())
    assert addresses[:2] == addresses[2:]
    assert len(set(addresses)) == 2


def test_a_ring_that_is_dropped_has_made_its_copies_before_its_memory_is_free() -> None:
    """Whoever got it next would write over what is still to be copied: torch does not know of the copies of others."""
    queue = CopyQueue()
    ring, target = played_ring(queue)(2, 8), torch.zeros(8, dtype=torch.uint8)
    with ring.borrow() as buffer:
        buffer.fill_(7)
        queue.enqueue(buffer, target)
    assert not target.any()
    del ring, buffer
    assert (target == 7).all()
    assert queue.num_waits == 1


REFUSALS = [
    ({"device_type": "cpu"}, "CUDA device only, not on cpu"),
    ({"capability": (7, 5)}, "compute capability 8.0 or more, not 7.5"),
    ({"dtype": torch.float32}, "float16 and bfloat16, not in float32"),
    ({"kv_dtype": torch.float16}, "does not read float16 with queries in bfloat16"),
    ({"has_head_scales": True}, "one scale for all KV heads of a layer, not one for each"),
]


@pytest.mark.parametrize(("change", "words"), REFUSALS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_refusals(change: dict[str, Any], words: str, phase: Phase) -> None:
    problem = dataclasses.replace(make_problem("cuda", BF16), capability=(9, 0))
    assert FlashInferBackend.refuse(problem, phase) is None
    assert words in str(FlashInferBackend.refuse(dataclasses.replace(problem, **change), phase))


@pytest.mark.parametrize(("kind", "words"), [({"head_dim": 80}, "not 80"), ({"has_sinks": True}, "no attention sinks")])
def test_kinds_that_are_refused(kind: dict[str, Any], words: str) -> None:
    problem = dataclasses.replace(make_problem("cuda", BF16, **kind), capability=(9, 0))
    assert words in str(FlashInferBackend.refuse(problem, "decode"))


def test_8_bit_pages_are_read() -> None:
    problem = dataclasses.replace(make_problem("cuda", BF16), kv_dtype=torch.float8_e4m3fn, capability=(9, 0))
    assert FlashInferBackend.refuse(problem, "decode") is None


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 32])
def test_a_head_of_its_own_per_kv_head_decodes_without_tensor_cores(
    group: int, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(flash_infer_kernels, "_load", lambda *arguments: asked.append(arguments))
    problem = dataclasses.replace(make_problem("cuda", BF16), capability=(9, 0))
    kind = make_spec(group, 1, 64).kind
    kernel = load_kernel(phase, kind, problem)
    expected = CudaCoreKernel if phase == "decode" and group < 2 else TensorCoreKernel
    assert type(kernel) is expected
    common = (BF16, BF16, BF16, torch.int32, 64, 64, 0, False, False)
    assert asked == [("decode", *common) if expected is CudaCoreKernel else ("prefill", "fa2", *common, False)]


def test_a_kernel_that_cannot_be_built_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no nvcc")

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", SimpleNamespace(get_batch_prefill_module=fail))
    with pytest.raises(ConfigError, match="'fi': flashinfer cannot build its prefill kernel here: no nvcc"):
        load_kernel("prefill", WIDE.kind, make_problem("cuda", BF16))
