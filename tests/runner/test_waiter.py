"""The thread that completes steps: in order, all or none after a failure, whatever callers do to their futures."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from aserve.errors import EngineDeadError
from aserve.runner.cuda.waiter import PendingStep, Waiter
from aserve.scheduler.plan import StepTokens


@dataclass
class PlayedEvent:
    """Happens when the test says so; ``error`` is what the device reports then."""

    error: Exception | None = None
    happened: threading.Event = field(default_factory=threading.Event)

    def synchronize(self) -> None:
        assert self.happened.wait(10)
        if self.error is not None:
            raise self.error


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    waiter = Waiter()
    yield waiter
    waiter.close()


def push(waiter: Waiter, event: PlayedEvent, report: Callable[[], StepTokens]) -> "Future[StepTokens]":
    future: Future[StepTokens] = Future()
    waiter.push(PendingStep(event, report, future))  # type: ignore[arg-type]
    return future


def test_a_step_completes_after_its_event_and_after_those_before_it(waiter: Waiter) -> None:
    events = [PlayedEvent(), PlayedEvent()]
    futures = [push(waiter, event, lambda step=i: StepTokens(step, [step])) for i, event in enumerate(events)]
    events[1].happened.set()
    with pytest.raises(TimeoutError):
        futures[1].result(0.05)
    events[0].happened.set()
    assert [future.result(10).token_ids for future in futures] == [[0], [1]]


def test_nobody_cancels_a_launched_step(waiter: Waiter) -> None:
    """A cancelled future could not be completed, and the thread would end there, with every later step unheard."""
    event = PlayedEvent()
    future = push(waiter, event, lambda: StepTokens(1, []))
    assert not future.cancel()
    event.happened.set()
    assert future.result(10).step_id == 1


def test_all_steps_after_a_failed_one_fail_and_name_the_cause(waiter: Waiter) -> None:
    failed, later = PlayedEvent(RuntimeError("an illegal memory access")), PlayedEvent()
    first = push(waiter, failed, lambda: pytest.fail("there is nothing to read"))
    second = push(waiter, later, lambda: pytest.fail("what is there means nothing"))
    failed.happened.set()
    later.happened.set()
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        first.result(10)
    with pytest.raises(EngineDeadError) as caught:
        second.result(10)
    assert caught.value.__cause__ is failed.error


def test_closing_waits_for_what_was_pushed() -> None:
    waiter, event = Waiter(), PlayedEvent()
    future = push(waiter, event, lambda: StepTokens(1, [7]))
    threading.Timer(0.05, event.happened.set).start()
    waiter.close()
    assert future.done()
