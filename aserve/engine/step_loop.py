"""The loop: plan, launch, await the previous step's tokens, commit, fan out; one asyncio task.

    turn    commit the oldest step if its tokens are here
            plan and launch until enough steps are on their way      the device is fed first,
            fan out at most FAN_OUT_STREAMS waiting deltas           the sinks come after
            deltas left: let the event loop run once; else sleep until something happens

Something happens when a step completes, a request arrives or one is aborted. Nothing here runs per token but the
delta's own delivery: a step costs one wake-up from the device and one loop turn per chunk of streams.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress

from aserve.engine.output_stream import OutputStream
from aserve.engine.process_tuning import ProcessTuning
from aserve.engine.trace import TraceRing
from aserve.errors import AserveError
from aserve.metrics import Metrics
from aserve.request import FinishReason, Request
from aserve.runner.base import ModelRunner
from aserve.scheduler.delta import SequenceDelta
from aserve.scheduler.plan import StepPlan, StepTokens
from aserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

FAN_OUT_STREAMS = 32


@dataclass(slots=True)
class _Flight:
    """A launched step. Times are time.monotonic()."""

    future: "Future[StepTokens]"
    num_rows: int
    num_tokens: int
    launched_s: float
    holds_next: bool = False  # no step may be launched before this one is committed
    done_s: float = 0.0


class StepLoop:
    """Drives scheduler and runner, and hands every delta to the stream of its request.

    All methods are called on the event loop's thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        metrics: Metrics,
        trace: TraceRing,
        *,
        overlap: bool,
        tuning: ProcessTuning,
    ) -> None:
        self.scheduler = scheduler
        self.trace = trace
        self.streams: dict[str, OutputStream] = {}  # every open request
        self.is_empty = asyncio.Event()  # set while no request is open
        self.is_empty.set()
        self._runner = runner
        self._metrics = metrics
        self._tuning = tuning
        self._overlap = overlap
        self._depth = 2 if overlap else 1  # steps on their way at once
        self._flights: deque[_Flight] = deque()  # in the order of their launch
        self._backlog: deque[tuple[OutputStream, SequenceDelta, float]] = deque()  # committed, not yet fanned out
        self._max_backlog = runner.limits.max_num_seqs
        self._grammar_rows: set[int] = set()  # kept only for a runner that cannot mask ahead
        self._events = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_done_s = 0.0  # when the device completed the newest committed step
        self._has_committed = False  # since the last launch or rest
        self._is_stopping = False
        self._runner_failure: Exception | None = None

    def waited_s(self) -> float:
        """Return for how long the oldest launched step has been the device's only concern; 0 if there is none."""
        if not self._flights or self._flights[0].future.done():
            return 0.0
        return time.monotonic() - max(self._flights[0].launched_s, self._last_done_s)

    def add(self, request: Request, stream: OutputStream) -> None:
        """Queue a request whose tokens are checked; raises what ``Scheduler.add`` raises."""
        self.scheduler.add(request, are_tokens_checked=True)
        self.trace.record_arrival(request)
        self.trace.rotate(is_idle=False)
        self.streams[request.request_id] = stream
        self.is_empty.clear()
        self._events.set()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> OutputStream | None:
        """Take a request out; returns its stream, None if it is not open. The sink is not told."""
        stream = self.remove(request_id)
        if stream is not None:
            self._abort_sequence(request_id, reason)
        return stream

    def remove(self, request_id: str) -> OutputStream | None:
        """Forget the stream of a request that has ended, or that the scheduler must not be asked about any more."""
        stream = self.streams.pop(request_id, None)
        if not self.streams:
            self.is_empty.set()
        return stream

    def end_lease(self, holder: str) -> None:
        """Give up the pages that are kept for ``holder``."""
        self.scheduler.end_lease(holder)
        self.trace.record_lease_end(holder)
        self._events.set()

    def stop(self) -> None:
        """Let ``run`` return at its next turn."""
        self._is_stopping = True
        self._events.set()

    async def run(self, on_failure: Callable[[Exception], None]) -> None:
        """Run until ``stop``; calls ``on_failure`` and returns if a step, the scheduler or the runner fails."""
        self._loop = asyncio.get_running_loop()
        self._runner.watch(self._note_failure)
        try:
            while not self._is_stopping:
                if self._runner_failure is not None:
                    raise self._runner_failure
                self._commit_oldest()
                self._launch_ahead()
                if self._backlog:
                    self._fan_out()
                    await asyncio.sleep(0)
                elif not (self._flights and self._flights[0].future.done()):
                    await self._sleep()
        except Exception as error:  # the one border where a step's failure ends
            logger.exception("a step failed")
            on_failure(error)

    async def _sleep(self) -> None:
        """Wait for the next event."""
        if not self._flights:
            self._has_committed = False
            self._tuning.relax()
            self.trace.rotate(is_idle=True)
        await self._events.wait()
        self._events.clear()
        self._tuning.tighten()

    def _commit_oldest(self) -> None:
        """Commit the oldest step if it is complete and its outputs would not pile up behind earlier ones."""
        if not self._flights or not self._flights[0].future.done() or len(self._backlog) >= self._max_backlog:
            return
        flight = self._flights.popleft()
        tokens = flight.future.result()
        self.trace.record_tokens(tokens)
        deltas = self.scheduler.commit(tokens)
        now = time.monotonic()
        find, append = self.streams.get, self._backlog.append
        for delta in deltas:
            stream = find(delta.request_id)
            if stream is not None:
                append((stream, delta, now))
        self._observe_step(flight, tokens)
        self.trace.rotate(is_idle=False)

    def _observe_step(self, flight: _Flight, tokens: StepTokens) -> None:
        metrics = self._metrics
        metrics.num_steps += 1
        metrics.batch_size.observe(flight.num_rows)
        metrics.step_tokens.observe(flight.num_tokens)
        started_s = max(flight.launched_s, self._last_done_s)
        metrics.step_time.observe(tokens.step_time_s or flight.done_s - started_s)
        self._last_done_s = flight.done_s
        self._has_committed = True

    def _launch_ahead(self) -> None:
        """Plan and launch as far ahead as allowed; without overlap only once every output has been seen."""
        while len(self._flights) < self._depth and (self._overlap or not self._backlog):
            if self._flights and self._flights[-1].holds_next:
                return
            plan = self.scheduler.schedule()
            self.trace.record_plan(plan)
            if plan is None:
                return
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for start in plan.row_starts:
            stream = self.streams.get(start.request_id)
            if stream is not None:
                stream.note_start(now)
        future = self._runner.launch(plan)
        flight = _Flight(future, len(plan.rows), plan.num_tokens, now, self._holds_next(plan))
        self._flights.append(flight)
        future.add_done_callback(lambda _: self._note_done(flight))
        if self._has_committed:
            self._has_committed = False
            self._metrics.step_turnaround.observe(flight.launched_s - self._last_done_s)

    def _holds_next(self, plan: StepPlan) -> bool:
        """Whether ``plan`` samples for a grammar that the runner must have seen move on before the next launch."""
        if self._runner.can_mask_ahead:
            return False
        rows = self._grammar_rows
        for start in plan.row_starts:
            rows.discard(start.row)
            if start.params.grammar is not None:
                rows.add(start.row)
        return bool(rows) and any(row in rows for row in compress(plan.rows, plan.is_sampled))

    def _note_failure(self, error: Exception) -> None:
        """Let the loop end with ``error``; called on a thread of the runner."""
        self._runner_failure = error
        self._wake()

    def _note_done(self, flight: _Flight) -> None:
        """Wake the loop; called on the runner's thread."""
        flight.done_s = time.monotonic()
        self._wake()

    def _wake(self) -> None:
        """Tell the loop, from any thread, that something has happened."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop was closed without a stop of the engine
            self._loop.call_soon_threadsafe(self._events.set)

    def _fan_out(self) -> None:
        """Deliver the oldest deltas, a bounded number of them."""
        backlog = self._backlog
        for _ in range(min(FAN_OUT_STREAMS, len(backlog))):
            stream, delta, now = backlog.popleft()
            try:
                if stream.deliver(delta, now):
                    self._abort_sequence(delta.request_id, FinishReason.STOP)
            except Exception:
                logger.exception("request %s: its sink or detokenizer failed", delta.request_id)
                self._abort_sequence(delta.request_id, FinishReason.ERROR)
                stream.break_off(AserveError("the output could not be delivered"), now)
            if stream.is_finished and self.streams.get(delta.request_id) is stream:
                self.remove(delta.request_id)

    def _abort_sequence(self, request_id: str, reason: FinishReason) -> None:
        if self.scheduler.abort(request_id, reason):
            self.trace.record_abort(request_id, reason)
            self._events.set()
