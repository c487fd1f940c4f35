"""The filler of step inputs, against plain loops; padding over dirty buffers (the CPU half of graph replay)."""

import random

import numpy as np
import pytest
import torch

from aserve.runner.inputs import InputBuffers, StepInputs
from aserve.runner.tables import DeviceTables
from aserve.runner.transfer import Transfer
from aserve.scheduler.plan import RowStart, StepPlan

ROWS = 8
NUM_PAGES, PAGE_SIZE = 100, 4


def plan_of(spans: list[tuple[int, int, int, bool]], num_decodes: int = 0) -> StepPlan:
    """``(row, computed, scheduled, sampled)`` each."""
    rows, computed, scheduled, sampled = (list(values) for values in zip(*spans, strict=True))
    return StepPlan(0, rows, computed, scheduled, sampled, num_decodes)  # type: ignore[arg-type]


def make_tables() -> DeviceTables:
    device = torch.device("cpu")
    return DeviceTables(
        max_num_seqs=ROWS,
        max_model_len=64,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        device=device,
        upload=Transfer(device).upload,
    )


def random_spans(source: random.Random) -> list[tuple[int, int, int, bool]]:
    rows = source.sample(range(ROWS), source.randint(1, ROWS))
    return [(row, source.randint(0, 30), source.randint(1, 12), source.random() < 0.5) for row in rows]


def check_against_loops(inputs: StepInputs, spans: list[tuple[int, int, int, bool]]) -> None:
    token_rows, positions, sampled, last_tokens = [], [], [], []
    for i, (row, computed, scheduled, is_sampled) in enumerate(spans):
        for position in range(computed, computed + scheduled):
            token_rows.append(row)
            positions.append(position)
        if is_sampled:
            sampled.append(i)
            last_tokens.append(len(positions) - 1)
    assert inputs.rows.tolist() == [row for row, *_ in spans]
    assert inputs.query_lens.tolist() == [scheduled for _, _, scheduled, _ in spans]
    assert inputs.key_lens.tolist() == [computed + scheduled for _, computed, scheduled, _ in spans]
    assert inputs.cu_query_lens.tolist() == [sum(span[2] for span in spans[:i]) for i in range(len(spans) + 1)]
    assert inputs.cu_key_lens.tolist() == [sum(span[1] + span[2] for span in spans[:i]) for i in range(len(spans) + 1)]
    assert inputs.token_rows.tolist() == token_rows
    assert inputs.positions.tolist() == positions
    assert inputs.sampled_seqs.tolist() == sampled
    assert inputs.sampled_tokens.tolist() == last_tokens
    assert inputs.max_key_len == max(computed + scheduled for _, computed, scheduled, _ in spans)
    assert inputs.is_fresh == all(computed == 0 for _, computed, _, _ in spans)


def test_random_steps_over_dirty_buffers() -> None:
    source = random.Random(1)
    buffers = InputBuffers(ROWS, 200)
    for _ in range(300):
        spans = random_spans(source)
        check_against_loops(buffers.fill(plan_of(spans)), spans)


@pytest.mark.parametrize("num_rows", range(1, ROWS + 1))
def test_padding_resets_every_row_after_a_larger_step(num_rows: int) -> None:
    """Rows n..cap: the dummy row at position 0, key length 1, its slot on the dummy page, prefix sums constant."""
    buffers, tables = InputBuffers(ROWS, 200), make_tables()
    buffers.fill(plan_of([(row, 40, 9, True) for row in range(ROWS)]))  # leaves dirt everywhere
    spans = [(row, 10 + row, 1, True) for row in range(num_rows)]
    plan = plan_of(spans, num_decodes=num_rows)
    plan.page_updates = [(row, index, row * 10 + index) for row in range(num_rows) for index in range(5)]
    tables.update(plan)
    inputs = buffers.fill(plan, padded_num_seqs=ROWS)
    num_padded = ROWS - num_rows
    assert inputs.num_seqs == inputs.num_tokens == num_rows
    assert inputs.rows[num_rows:].tolist() == [ROWS] * num_padded
    assert inputs.query_lens[num_rows:].tolist() == [0] * num_padded
    assert inputs.key_lens[num_rows:].tolist() == [1] * num_padded
    assert inputs.token_rows[num_rows:].tolist() == [ROWS] * num_padded
    assert inputs.positions[num_rows:].tolist() == [0] * num_padded
    assert inputs.cu_query_lens.tolist() == [*range(num_rows + 1), *[num_rows] * num_padded]
    assert inputs.sampled_seqs.tolist() == list(range(num_rows))
    step = tables.gather(inputs, plan)
    batch = step.batch
    assert batch.num_decodes == ROWS
    assert step.slot_mapping[num_rows:].tolist() == [NUM_PAGES * PAGE_SIZE] * num_padded
    assert batch.page_table[num_rows:].unique().tolist() == ([NUM_PAGES] if num_padded else [])
    assert (batch.page_table[:num_rows, : 10 // PAGE_SIZE] < NUM_PAGES).all()
    assert batch.cu_query_lens.tolist() == inputs.cu_query_lens.tolist()


def test_the_arrays_are_those_that_a_graph_would_have_captured() -> None:
    """Addresses do not move between fills."""
    buffers = InputBuffers(ROWS, 200)
    addresses = set()
    for count in (1, 5, ROWS):
        inputs = buffers.fill(plan_of([(row, 3, 1, True) for row in range(count)], count), padded_num_seqs=ROWS)
        addresses.add(tuple(array.ctypes.data for array in (inputs.rows, inputs.key_lens, inputs.cu_query_lens)))
    assert len(addresses) == 1


def test_three_kinds_of_prefix_sums() -> None:
    buffers, tables = InputBuffers(ROWS, 200), make_tables()

    def gather(plan: StepPlan) -> tuple[list[int], list[int], bool]:
        batch = tables.gather(buffers.fill(plan), plan).batch
        assert batch.cu_key_lens is not None
        is_shared = batch.cu_query_lens is batch.cu_key_lens
        return batch.cu_query_lens.tolist(), batch.cu_key_lens.tolist(), is_shared

    decodes = plan_of([(3, 7, 1, True), (1, 2, 1, True)], num_decodes=2)
    assert gather(decodes) == ([0, 1, 2], [0, 8, 11], False)
    fresh = plan_of([(3, 0, 7, True), (1, 0, 2, False)])
    assert gather(fresh) == ([0, 7, 9], [0, 7, 9], True)
    after_prefix = plan_of([(3, 4, 7, True), (1, 0, 2, False)])
    assert gather(after_prefix) == ([0, 7, 9], [0, 11, 13], False)


def test_ids_and_slots_come_from_the_tables() -> None:
    buffers, tables = InputBuffers(ROWS, 200), make_tables()
    plan = plan_of([(5, 3, 1, True), (2, 2, 4, False)], num_decodes=1)
    plan.row_starts = [
        RowStart(5, [10, 11, 12, 13], 4, 0, None),  # type: ignore[arg-type]
        RowStart(2, [20, 21, 22, 23, 24, 25, 26], 7, 0, None),  # type: ignore[arg-type]
    ]
    plan.page_updates = [(5, 0, 7), (2, 0, 9), (2, 1, 1)]
    tables.update(plan)
    step = tables.gather(buffers.fill(plan), plan)
    batch = step.batch
    assert step.token_ids.tolist() == [13, 22, 23, 24, 25]
    assert step.positions.tolist() == [3, 2, 3, 4, 5]
    assert step.slot_mapping.tolist() == [7 * 4 + 3, 9 * 4 + 2, 9 * 4 + 3, 1 * 4, 1 * 4 + 1]
    assert batch.page_table.tolist() == [[7, NUM_PAGES], [9, 1]]
    assert batch.page_table.dtype == torch.int32
    tables.store_sampled(np.array([5]), np.array([4]), torch.tensor([77]))
    following = plan_of([(5, 4, 1, True)], num_decodes=1)
    following.page_updates = [(5, 1, 3)]
    tables.update(following)
    step = tables.gather(buffers.fill(following), following)
    assert step.token_ids.tolist() == [77]
    assert step.slot_mapping.tolist() == [12]


def test_a_step_does_not_read_the_buffers_of_the_next() -> None:
    """What was gathered stays as it was when the host fills its buffers again."""
    buffers, tables = InputBuffers(ROWS, 200), make_tables()
    plan = plan_of([(0, 3, 5, True)])
    step = tables.gather(buffers.fill(plan), plan)
    batch = step.batch
    before = [tensor.tolist() for tensor in (step.positions, batch.key_lens_device, batch.cu_query_lens)]
    buffers.fill(plan_of([(row, 20, 9, True) for row in range(ROWS)]))
    assert before == [tensor.tolist() for tensor in (step.positions, batch.key_lens_device, batch.cu_query_lens)]
