"""One step's way from plan to device: arrays, pages, drafts and prompts in one pinned buffer, one copy, two tables."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from aserve.attention.base import CaptureShape, DecodeOrder, StepLens
from aserve.runner.cuda.device_state import DeviceState
from aserve.runner.cuda.step_arrays import ArrayLayout, StepFiller, StepRows
from aserve.runner.cuda.streams import UploadSlot, UploadSlots
from aserve.runner.verification import draft_cells
from aserve.sampling.sampler import Sampler
from aserve.scheduler.plan import StepPlan

CELL_WORDS = 3  # of a new page or a draft: its place in the table, which takes two, and its value


@dataclass(frozen=True, slots=True)
class StagedStep:
    """What the host still needs of a step that is on its way."""

    lens: StepLens
    sampled: StepRows
    is_plain: bool  # all sampled rows want a plain draw


class Staging:
    """Fills the slots; all device work it enqueues is on the current stream, after the upload."""

    def __init__(
        self,
        slots: UploadSlots,
        layout: ArrayLayout,
        state: DeviceState,
        sampler: Sampler,
        decode_order: DecodeOrder = "longest first",
    ) -> None:
        self._slots = slots
        self._layout = layout
        self._state = state
        self._sampler = sampler
        self._filler = StepFiller(layout.max_num_seqs, decode_order)

    def send(self, plan: StepPlan, shape: CaptureShape, head_size: int) -> StagedStep:
        """Bring the inputs of ``plan``, padded to ``shape`` and ``head_size`` samples, to the device."""
        first_prompt = self._layout.num_words + CELL_WORDS * _count_cells(plan)
        num_words = first_prompt
        if plan.row_starts:
            num_words += sum(len(start.token_ids) for start in plan.row_starts)
        slot = self._slots.acquire(num_words)
        arrays = slot.arrays
        num_sampled = max(head_size, self._state.num_sampled(shape))
        lens, sampled = self._filler.fill(arrays, plan, shape, num_sampled)
        count = len(sampled.rows)
        is_plain = self._sampler.are_plain(sampled.rows, sampled.positions)
        if is_plain:
            self._sampler.plain_inputs(
                sampled.rows, sampled.positions, arrays.uniforms[:count], arrays.temperatures[:count]
            )
        self._append_cells(slot.words[self._layout.num_words : first_prompt], plan)
        self._append_prompts(slot.words[first_prompt:], plan)
        self._apply(slot, plan, num_words)
        return StagedStep(lens, sampled, is_plain)

    def send_padding(self, shape: CaptureShape) -> StepLens:
        """Bring a step of ``shape`` to the device that holds little but padding."""
        dummy_row = self._layout.max_num_seqs
        count = shape.num_decodes if not shape.num_chunks else 1
        plan = StepPlan(-1, [dummy_row] * count, [0] * count, [1] * count, [True] * count)
        plan.num_decodes = 0 if shape.num_chunks else count
        return self.send(plan, shape, 0).lens

    def _append_cells(self, words: NDArray[np.int32], plan: StepPlan) -> None:
        """Write all places, pages before drafts, then all values; so the places, of 8 bytes, are aligned."""
        count, num_pages = _count_cells(plan), len(plan.page_updates)
        if not count:
            return
        places, values = words[: 2 * count].view(np.int64), words[2 * count :]
        if num_pages:
            rows, indices, pages = np.array(plan.page_updates, np.int64).T
            places[:num_pages] = rows * self._state.page_table.stride(0) + indices
            values[:num_pages] = pages
        if plan.drafts:
            rows, positions, token_ids = draft_cells(plan)
            places[num_pages:] = rows * self._state.token_pool.stride(0) + positions
            values[num_pages:] = token_ids

    def _append_prompts(self, words: NDArray[np.int32], plan: StepPlan) -> None:
        place = 0
        for start in plan.row_starts:
            words[place : place + len(start.token_ids)] = start.token_ids
            place += len(start.token_ids)

    def _apply(self, slot: UploadSlot, plan: StepPlan, num_words: int) -> None:
        """Copy the slot and write what it holds to where the step reads it."""
        words, state = self._slots.send(slot, num_words), self._state
        state.words.copy_(words[: self._layout.num_words])
        place, num_pages = self._layout.num_words, len(plan.page_updates)
        if count := _count_cells(plan):
            halves, values = words[place : place + CELL_WORDS * count].split([2 * count, count])
            cells = halves.view(torch.int64)
            if num_pages:
                state.page_table.view(-1).scatter_(0, cells[:num_pages], values[:num_pages])
            if plan.drafts:
                state.token_pool.view(-1).scatter_(0, cells[num_pages:], values[num_pages:])
            place += CELL_WORDS * count
        for start in plan.row_starts:
            stop = place + len(start.token_ids)
            state.token_pool[start.row, : len(start.token_ids)].copy_(words[place:stop])
            place = stop
        self._slots.release(slot)


def _count_cells(plan: StepPlan) -> int:
    """Return how many single entries of the tables ``plan`` writes."""
    return len(plan.page_updates) + sum(map(len, plan.drafts))
