"""A replay that also launches each plan on a device, and keeps what the device's page table was after each step."""

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from aserve.engine.replay import _Replay
from aserve.runner.base import ModelRunner
from aserve.runner.cuda.cuda_runner import CudaRunner
from aserve.scheduler.plan import RowStart, StepPlan, StepTokens

Sample = tuple[tuple[str, int], int]  # (request id, place among its outputs), token


class DeviceReplay(_Replay):
    """Commits the recorded tokens, so that the plans are the recorded ones whatever the device samples."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        assert isinstance(runner, CudaRunner)
        self._runner = runner
        self._dummy_page = runner.limits.num_pages
        self._expected = torch.full_like(runner._state.page_table, self._dummy_page, device="cpu")
        self._rows: dict[int, RowStart] = {}
        self._tables: list[tuple[StepPlan, Tensor, Tensor]] = []  # plan, table as planned, as on the device
        self._samples: list[tuple[list[tuple[str, int]], Future[StepTokens]]] = []

    def check_tables(self) -> int:
        """Raise AssertionError unless the device's table was the planned one after each step; return how many."""
        torch.cuda.synchronize()  # the copies were made on the runner's stream
        for plan, expected, on_device in self._tables:
            assert torch.equal(on_device.cpu(), expected), f"step {plan.step_id}"
            for row, start, count in zip(plan.rows, plan.num_computed, plan.num_scheduled, strict=True):
                pages = expected[row, : -(-(start + count) // self._runner.limits.page_size)].tolist()
                assert self._dummy_page not in pages, f"step {plan.step_id}: row {row} has no page for its keys"
                assert len(set(pages)) == len(pages), f"step {plan.step_id}: row {row} has a page twice"
        return len(self._tables)

    def sampled_tokens(self) -> list[Sample]:
        """Return what the device sampled."""
        return [
            sample
            for places, future in self._samples
            for sample in zip(places, future.result(60).token_ids, strict=True)
        ]

    def _compare(self, plan: StepPlan | None, recorded: dict[str, Any] | None) -> str | None:
        difference = super()._compare(plan, recorded)
        if difference is None and plan is not None:
            self._launch(plan)
        return difference

    def _launch(self, plan: StepPlan) -> None:
        self._rows |= {start.row: start for start in plan.row_starts}
        for row, index, page in plan.page_updates:
            self._expected[row, index] = page
        places = [
            (self._rows[row].request_id, start + count - self._rows[row].prompt_len)
            for row, start, count, is_sampled in zip(
                plan.rows, plan.num_computed, plan.num_scheduled, plan.is_sampled, strict=True
            )
            if is_sampled
        ]
        self._samples.append((places, self._runner.launch(plan)))
        self._tables.append((plan, self._expected.clone(), self._table_behind_step()))

    def _table_behind_step(self) -> Tensor:
        """Copy the table behind the step that was launched last; the host does not wait."""
        assert isinstance(self._runner, CudaRunner)
        with torch.cuda.stream(self._runner._compute):
            return self._runner._state.page_table.clone()
