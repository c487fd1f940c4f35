"""What the host writes for a padded step, over buffers that a larger step left dirty; and the kernel that reads it."""

import numpy as np
import pytest
import torch
from doubles_attention import torch_backend

from aserve.attention.base import CaptureShape
from aserve.distributed.context_shard import ContextShard
from aserve.kernels.gpu.moe_launch import MoeLaunch, choose_moe_launch
from aserve.kernels.gpu.step_inputs import PageSlots, SequenceSpans, TokenInputs, gather_inputs
from aserve.runner.cuda.graphs import GraphSizes
from aserve.runner.cuda.sizes import (
    MAX_CHUNKS,
    decode_shape,
    decode_sizes,
    exact_shape,
    fitting,
    mixed_shape,
    token_sizes,
    warm_up_sizes,
)
from aserve.runner.cuda.step_arrays import ArrayLayout, Fields, StepFiller
from aserve.scheduler.plan import StepPlan

ROWS = 6  # rows 0 .. 5, so 6 is the dummy row
PAGE_SIZE = 4
DIRT = 77


def plan_of(spans: list[tuple[int, int, int, bool]], num_decodes: int = 0) -> StepPlan:
    """Spans are (row, computed, scheduled, is sampled)."""
    rows, computed, scheduled, sampled = (list(column) for column in zip(*spans, strict=True))
    return StepPlan(0, rows, computed, scheduled, sampled, num_decodes)


def dirty_arrays(max_num_drafts: int = 0) -> Fields:
    layout = ArrayLayout(ROWS, max_num_drafts)
    return layout.host_views(np.full(layout.num_words, DIRT, np.int32))


MIXED = plan_of([(4, 9, 1, True), (1, 3, 1, True), (0, 0, 5, True), (2, 8, 3, False)], num_decodes=2)


def test_a_mixed_step_keeps_decodes_and_chunks_in_their_sections() -> None:
    arrays = dirty_arrays()
    lens, _ = StepFiller(ROWS).fill(arrays, MIXED, CaptureShape(num_tokens=16, num_decodes=4, num_chunks=3), 5)
    assert arrays.rows[:8].tolist() == [4, 1, 6, 6, 0, 2, 6, 6]
    assert arrays.query_lens[:8].tolist() == [1, 1, 0, 0, 5, 3, 0, 16 - 10]
    assert arrays.query_starts[[0, 1, 4, 5, 7]].tolist() == [0, 1, 2, 7, 10]
    assert lens.key_lens.tolist() == [10, 4, 1, 1, 5, 11, 0]
    assert lens.cu_query_lens.tolist() == [2, 7, 10, 10]
    assert arrays.cu_chunk_lens[:4].tolist() == [2, 7, 10, 10]


@pytest.mark.parametrize("count", range(1, ROWS + 1))
def test_padding_decodes_have_one_key_and_no_query(count: int) -> None:
    arrays = dirty_arrays()
    plan = plan_of([(row, 10 + row, 1, True) for row in range(count)], count)
    lens, _ = StepFiller(ROWS).fill(arrays, plan, decode_shape(ROWS), ROWS)
    pad = ROWS - count
    assert arrays.rows[: ROWS + 1].tolist() == [*reversed(range(count)), *[6] * (pad + 1)]
    assert lens.key_lens.tolist() == [*reversed(range(11, 11 + count)), *[1] * pad]
    assert arrays.query_lens[: ROWS + 1].tolist() == [1] * count + [0] * pad + [pad]
    assert arrays.query_starts[ROWS] == count


def test_sampled_rows_are_listed_in_plan_order_and_padded() -> None:
    arrays = dirty_arrays()
    _, rows = StepFiller(ROWS).fill(arrays, MIXED, CaptureShape(16, 4, 3), 5)
    assert (rows.rows.tolist(), rows.positions.tolist()) == ([4, 1, 0], [10, 4, 5])
    assert arrays.sampled_tokens[:5].tolist() == [0, 1, 6, 0, 0]
    assert arrays.sampled_rows[:5].tolist() == [4, 1, 0, 6, 6]
    assert arrays.sampled_positions[:5].tolist() == [10, 4, 5, 0, 0]
    assert arrays.temperatures[3:5].tolist() == [0, 0]
    assert arrays.uniforms[3:5].tolist() == [0, 0]


def test_a_row_with_drafts_is_a_chunk_that_is_sampled_after_each_of_its_tokens() -> None:
    """A decode, a row with two drafts, one with one, then a chunk that is not sampled."""
    arrays = dirty_arrays(max_num_drafts=4)
    plan = plan_of([(4, 9, 1, True), (1, 3, 3, True), (5, 7, 2, True), (0, 0, 5, False)], num_decodes=1)
    plan.drafts = [[50, 51], [60]]
    lens, rows = StepFiller(ROWS).fill(arrays, plan, CaptureShape(16, 4, 5), 8)
    assert lens.key_lens.tolist() == [10, 1, 1, 1, 6, 9, 5, 0, 0]
    assert lens.cu_query_lens.tolist() == [1, 4, 6, 11, 11, 11]
    assert rows.rows.tolist() == [4, 1, 1, 1, 5, 5]
    assert rows.positions.tolist() == [10, 4, 5, 6, 8, 9]
    assert arrays.sampled_tokens[:8].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert arrays.sampled_rows[:8].tolist() == [4, 1, 1, 1, 5, 5, 6, 6]
    assert arrays.sampled_positions[:8].tolist() == [10, 4, 5, 6, 8, 9, 0, 0]


def test_heads_are_captured_for_drafts_too() -> None:
    sizes = GraphSizes.choose(torch_backend(), 24, 160, max_num_drafts=30, enabled=True)
    assert (max(sizes.decodes), max(sizes.heads)) == (24, 54)
    assert max(GraphSizes.choose(torch_backend(), 24, 40, max_num_drafts=30, enabled=True).heads) == 40


def test_decodes_with_most_keys_stand_first_and_samples_keep_the_order_of_the_plan() -> None:
    arrays = dirty_arrays()
    plan = plan_of([(0, 4, 1, True), (1, 9, 1, True), (2, 4, 1, True), (3, 20, 1, True)], 4)
    lens, sampled = StepFiller(ROWS).fill(arrays, plan, decode_shape(5), 5)
    assert arrays.rows[:5].tolist() == [3, 1, 0, 2, 6]
    assert lens.key_lens.tolist() == [21, 10, 5, 5, 1]
    assert sampled.rows.tolist() == [0, 1, 2, 3]
    assert arrays.sampled_tokens[:5].tolist() == [2, 1, 3, 0, 0]
    assert arrays.sampled_positions[:5].tolist() == [5, 10, 5, 21, 0]


@pytest.mark.parametrize(("count", "rows"), [(1, [0]), (4, [3, 0, 1, 2]), (5, [3, 0, 1, 2, 4])])
def test_long_and_short_decodes_in_turn_where_the_backend_wants_that(count: int, rows: list[int]) -> None:
    arrays = dirty_arrays()
    computed = [4, 9, 5, 20, 7][:count]
    plan = plan_of([(row, num_computed, 1, True) for row, num_computed in enumerate(computed)], count)
    lens, sampled = StepFiller(ROWS, "long and short").fill(arrays, plan, decode_shape(ROWS), ROWS)
    assert arrays.rows[:count].tolist() == rows
    assert lens.key_lens.tolist() == [computed[row] + 1 for row in rows] + [1] * (ROWS - count)
    assert sampled.rows.tolist() == list(range(count))
    assert arrays.sampled_tokens[:count].tolist() == [rows.index(row) for row in range(count)]


@pytest.mark.parametrize("shard", [ContextShard(), ContextShard(0, 2), ContextShard(3, 4)])
@pytest.mark.parametrize("shape", [CaptureShape(16, 4, 3), exact_shape(MIXED)])
def test_the_kernel_finds_every_token_where_the_tables_say(shape: CaptureShape, shard: ContextShard) -> None:
    """Among several ranks, those of others go to the first slot of page 99."""
    generator = torch.Generator().manual_seed(1)
    pool = torch.randint(0, 1000, (ROWS + 1, 20), generator=generator, dtype=torch.int32)
    table = torch.randperm((ROWS + 1) * 5, generator=generator).view(ROWS + 1, 5).int()
    layout = ArrayLayout(ROWS)
    words = np.full(layout.num_words, DIRT, np.int32)
    StepFiller(ROWS).fill(layout.host_views(words), MIXED, shape, 5)
    arrays = layout.device_views(torch.from_numpy(words))
    num_seqs = shape.num_decodes + shape.num_chunks
    spans = SequenceSpans(
        arrays.rows[: num_seqs + 1],
        arrays.query_starts[: num_seqs + 1],
        arrays.query_lens[: num_seqs + 1],
        arrays.key_lens[:num_seqs],
    )
    inputs = TokenInputs(*torch.full((3, shape.num_tokens), -1))
    gather_inputs(spans, pool, PageSlots(table, PAGE_SIZE, shard, dummy_page=99), inputs)
    expected = [(4, 9), (1, 3), *((0, i) for i in range(5)), *((2, i) for i in range(8, 11))]
    expected += [(6, 0)] * (shape.num_tokens - len(expected))
    assert inputs.positions.tolist() == [position for _, position in expected]
    assert inputs.token_ids.tolist() == [int(pool[row, position]) for row, position in expected]
    own_size = PAGE_SIZE // shard.size
    slots = [
        int(table[row, position // PAGE_SIZE]) * own_size + position // shard.size % own_size
        if position % shard.size == shard.rank
        else 99 * own_size
        for row, position in expected
    ]
    assert inputs.slot_mapping.tolist() == slots


def test_arrays_lie_apart_and_views_on_both_sides_agree() -> None:
    layout = ArrayLayout(ROWS)
    words = torch.zeros(layout.num_words, dtype=torch.int32)
    host, device = layout.host_views(words.numpy()), layout.device_views(words)
    for i, name in enumerate(Fields.__slots__):
        getattr(host, name)[:] = i + 1
    for i, name in enumerate(Fields.__slots__):
        assert getattr(device, name).unique().tolist() == [i + 1], name
        assert len(getattr(device, name)) == len(getattr(host, name))


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 8, 256, 320, 1000])
def test_every_batch_up_to_the_largest_fits_a_decode_graph(max_num_seqs: int) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_num_seqs, 512)
    for count in range(1, sizes[-1] + 1):
        size = fitting(sizes, count)
        assert size is not None
        assert count <= size <= max(2 * count, count + 8)
    assert fitting(sizes, sizes[-1] + 1) is None


@pytest.mark.parametrize(("max_num_seqs", "max_num_tokens"), [(320, 64), (320, 1), (64, 64), (24, 8192)])
def test_no_graph_holds_more_tokens_than_a_step_may_have(max_num_seqs: int, max_num_tokens: int) -> None:
    sizes = GraphSizes.choose(torch_backend(), max_num_seqs, max_num_tokens, enabled=True)
    most = min(max_num_seqs, max_num_tokens)
    assert max(sizes.decodes) == max(sizes.heads) == most
    assert all(shape.num_tokens <= max_num_tokens for shape in sizes.shapes())


@pytest.mark.parametrize("max_num_tokens", [512, 1500, 8192])
@pytest.mark.parametrize(("num_experts", "experts_per_token"), [(128, 8), (8, 2), (32, 4), (128, 4), (256, 8)])
def test_what_is_run_ahead_of_clients_uses_all_launches_of_experts(
    num_experts: int, experts_per_token: int, max_num_tokens: int
) -> None:
    """With the largest step, which is run to measure memory; else one would be compiled while a client waits."""

    def launch(num_tokens: int) -> MoeLaunch:
        return choose_moe_launch(num_tokens * experts_per_token / num_experts, 2, 227 << 10)

    sizes = warm_up_sizes(max_num_tokens)
    assert sizes == sorted(set(sizes))
    run = {launch(size) for size in (*sizes, max_num_tokens)}
    assert run >= {launch(num_tokens) for num_tokens in range(1, max_num_tokens + 1)}


@pytest.mark.parametrize("max_num_tokens", [1, 16, 100, 8192])
def test_padding_of_a_mixed_step_stays_below_an_eighth(max_num_tokens: int) -> None:
    sizes = token_sizes(max_num_tokens)
    assert sizes[-1] == max_num_tokens
    for count in range(1, max_num_tokens + 1):
        size = fitting(sizes, count)
        assert size is not None
        assert count <= size <= max(count * 9 / 8 + 1, count + 16)


def test_a_mixed_shape_holds_all_decodes_and_a_bounded_number_of_chunks() -> None:
    assert mixed_shape(16, 320) == CaptureShape(16, 16, 16)
    assert mixed_shape(8192, 320) == CaptureShape(8192, 320, MAX_CHUNKS)
