"""The thread that sleeps until the device is done with a step and tells whoever waits for its tokens."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from aserve.errors import EngineDeadError
from aserve.scheduler.plan import StepTokens


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step: ``report`` reads pinned memory once ``done`` has happened on the device."""

    done: torch.cuda.Event
    report: Callable[[], StepTokens]
    future: "Future[StepTokens]"


class Waiter:
    """Completes steps in the order of their launch; waits without the interpreter lock, so the event loop runs on.

    After a failed step the state of the device is unknown, so all later ones fail too.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aserve-waiter", daemon=True)
        self._thread.start()

    def push(self, step: PendingStep) -> None:
        """Complete ``step`` after all that were pushed before it; nobody can cancel its future any more."""
        step.future.set_running_or_notify_cancel()
        self._queue.put(step)

    def close(self) -> None:
        """Wait for what was pushed. Idempotent."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        failure: BaseException | None = None
        while (step := self._queue.get()) is not None:
            if failure is None:
                failure = _complete(step)
            else:
                error = EngineDeadError("an earlier step failed")
                error.__cause__ = failure
                step.future.set_exception(error)


def _complete(step: PendingStep) -> BaseException | None:
    """Wait for ``step`` and resolve its future; returns what went wrong."""
    try:
        step.done.synchronize()
        tokens = step.report()
    except BaseException as error:
        step.future.set_exception(error)
        return error
    step.future.set_result(tokens)
    return None
