"""The filler of step inputs, against plain loops; padding over dirty buffers (the CPU half of graph replay)."""

import random

import numpy as np
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
        max_num_tokens=200,
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
