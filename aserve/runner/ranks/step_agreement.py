"""Completes a step when every rank has executed it, and only if all of them did the same."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from aserve.errors import EngineDeadError
from aserve.scheduler.plan import StepTokens


@dataclass(slots=True)
class _Flight:
    """A launched step; ``digests`` by rank."""

    step_id: int
    future: "Future[StepTokens]" = field(default_factory=Future)
    tokens: StepTokens | None = None
    digests: dict[int, bytes] = field(default_factory=dict)


class StepAgreement:
    """Steps are reported by each rank in the order of their launch. Safe to use from several threads."""

    def __init__(self, num_ranks: int) -> None:
        self.failure: Exception | None = None
        self._num_ranks = num_ranks
        self._num_reports = [0] * num_ranks
        self._num_completed = 0
        self._flights: deque[_Flight] = deque()
        self._on_failure: Callable[[Exception], None] | None = None
        self._lock = threading.Lock()

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Call ``on_failure`` with what ends the agreement, at once if it has ended."""
        with self._lock:
            self._on_failure = on_failure
            failure = self.failure
        if failure is not None:
            on_failure(failure)

    def expect(self, step_id: int) -> "Future[StepTokens]":
        """Return the future of the step that is launched now. Raises EngineDeadError after a failure."""
        with self._lock:
            if self.failure is not None:
                raise EngineDeadError(str(self.failure)) from self.failure
            flight = _Flight(step_id)
            flight.future.set_running_or_notify_cancel()
            self._flights.append(flight)
            return flight.future

    def answer(self, tokens: StepTokens, digest: bytes) -> None:
        """Take rank 0's result of its next step: the tokens that count."""
        with self._lock:
            if self.failure is None:
                self._flights[self._num_reports[0] - self._num_completed].tokens = tokens
        self.report(0, digest)

    def report(self, rank: int, digest: bytes) -> None:
        """Take the hash of the next step of ``rank``."""
        with self._lock:
            if self.failure is not None:
                return
            flight = self._flights[self._num_reports[rank] - self._num_completed]
            self._num_reports[rank] += 1
            flight.digests[rank] = digest
            diverged = len(set(flight.digests.values())) > 1
            if not diverged:
                self._complete()
        if diverged:
            ranks = ", ".join(f"rank {one}: {value.hex()}" for one, value in sorted(flight.digests.items()))
            self.fail(EngineDeadError(f"ranks have diverged in step {flight.step_id} ({ranks})"))

    def fail(self, error: Exception) -> Exception:
        """Fail every launched step and all to come with ``error``, unless there was one before; return the first."""
        with self._lock:
            if self.failure is not None:
                return self.failure
            self.failure = error
            flights, self._flights = self._flights, deque()
            on_failure = self._on_failure
        for flight in flights:
            flight.future.set_exception(error)
        if on_failure is not None:
            on_failure(error)
        return error

    def _complete(self) -> None:
        while self._flights and len(self._flights[0].digests) == self._num_ranks:
            flight = self._flights.popleft()
            self._num_completed += 1
            assert flight.tokens is not None  # rank 0 has reported
            flight.future.set_result(flight.tokens)
