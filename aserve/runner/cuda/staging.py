"""One step's way from plan to device: arrays, new pages and new prompts in one pinned buffer, one copy, two tables."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from aserve.attention.base import CaptureShape, StepLens
from aserve.runner.cuda.device_state import DeviceState
from aserve.runner.cuda.step_arrays import ArrayLayout, StepFiller, StepRows
from aserve.runner.cuda.streams import UploadSlot, UploadSlots
from aserve.sampling.sampler import Sampler
from aserve.scheduler.plan import StepPlan

PAGE_WORDS = 3  # of a new page: its place in the table, which takes two, and its number


@dataclass(frozen=True, slots=True)
class StagedStep:
    """What the host still needs of a step that is on its way."""

    lens: StepLens
    sampled: StepRows
    is_plain: bool  # all sampled rows want a plain draw


class Staging:
    """Fills the slots; all device work it enqueues is on the current stream, after the upload."""

    def __init__(self, slots: UploadSlots, layout: ArrayLayout, state: DeviceState, sampler: Sampler) -> None:
        self._slots = slots
        self._layout = layout
        self._state = state
        self._sampler = sampler
        self._filler = StepFiller(layout.max_num_sampled)

    def send(self, plan: StepPlan, shape: CaptureShape, head_size: int) -> StagedStep:
        """Bring the inputs of ``plan``, padded to ``shape`` and ``head_size`` sampled rows, to the device."""
        num_page_words = PAGE_WORDS * len(plan.page_updates)
        num_words = self._layout.num_words + num_page_words
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
        self._append_pages(slot.words[self._layout.num_words :], plan)
        self._append_prompts(slot.words[self._layout.num_words + num_page_words :], plan)
        self._apply(slot, plan, num_words)
        return StagedStep(lens, sampled, is_plain)

    def send_padding(self, shape: CaptureShape) -> StepLens:
        """Bring a step of ``shape`` to the device that holds little but padding."""
        dummy_row = self._layout.max_num_sampled
        count = shape.num_decodes if not shape.num_chunks else 1
        plan = StepPlan(-1, [dummy_row] * count, [0] * count, [1] * count, [True] * count)
        plan.num_decodes = 0 if shape.num_chunks else count
        return self.send(plan, shape, 0).lens

    def _append_pages(self, words: NDArray[np.int32], plan: StepPlan) -> None:
        count = len(plan.page_updates)
        if not count:
            return
        rows, indices, pages = np.array(plan.page_updates, np.int32).T
        words[: 2 * count].view(np.int64)[:] = rows * np.int64(self._state.page_table.stride(0)) + indices
        words[2 * count : PAGE_WORDS * count] = pages

    def _append_prompts(self, words: NDArray[np.int32], plan: StepPlan) -> None:
        place = 0
        for start in plan.row_starts:
            words[place : place + len(start.token_ids)] = start.token_ids
            place += len(start.token_ids)

    def _apply(self, slot: UploadSlot, plan: StepPlan, num_words: int) -> None:
        """Copy the slot and write what it holds to where the step reads it."""
        words, state = self._slots.send(slot, num_words), self._state
        state.words.copy_(words[: self._layout.num_words])
        place = self._layout.num_words
        if count := len(plan.page_updates):
            places, pages = words[place : place + PAGE_WORDS * count].split([2 * count, count])
            state.page_table.view(-1).scatter_(0, places.view(torch.int64), pages)
            place += PAGE_WORDS * count
        for start in plan.row_starts:
            stop = place + len(start.token_ids)
            state.token_pool[start.row, : len(start.token_ids)].copy_(words[place:stop])
            place = stop
        self._slots.release(slot)
