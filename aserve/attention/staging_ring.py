"""Pinned buffers in turn, each rewritten only after what was copied from it has reached the device."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

MIN_BUFFERS = 3  # for each plan of a step: two steps in flight and one that is being planned


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that guards a buffer."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class StagingRing:
    """Lends one buffer at a time to whoever writes it and enqueues its copy on the current stream.

    Whoever drops a ring waits for its last copies. torch does not know of those that others enqueue, and would give the
    memory to the next who wants some.
    """

    def __init__(
        self, num_buffers: int, num_bytes: int, *, pin: bool = True, new_event: Callable[[], Event] = torch.cuda.Event
    ) -> None:
        self._buffers = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(num_buffers)]
        self._copied = [new_event() for _ in range(num_buffers)]
        self._next = 0
        weakref.finalize(self, _wait_for_copies, self._copied, self._buffers).atexit = False

    @contextmanager
    def borrow(self) -> Iterator[Tensor]:
        """Yield the buffer that was lent longest ago; waits if its copy has not been made yet."""
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        self._copied[index].synchronize()
        try:
            yield self._buffers[index]
        finally:
            self._copied[index].record()


def _wait_for_copies(copied: Sequence[Event], _buffers: Sequence[Tensor]) -> None:
    """Wait; until then the buffers are referred to from here."""
    for event in copied:
        event.synchronize()
