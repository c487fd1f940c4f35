"""Pinned buffers in turn, each rewritten only after what was copied from it has reached the device."""

from collections.abc import Callable, Iterator
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
    """Lends one buffer at a time to whoever writes it and enqueues its copy on the current stream."""

    def __init__(
        self, num_buffers: int, num_bytes: int, *, pin: bool = True, new_event: Callable[[], Event] = torch.cuda.Event
    ) -> None:
        self._buffers = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(num_buffers)]
        self._copied = [new_event() for _ in range(num_buffers)]
        self._next = 0

    @contextmanager
    def borrow(self) -> Iterator[Tensor]:
        """Yield the buffer that was lent longest ago; waits if its copy has not been made yet."""
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        self._copied[index].synchronize()
        yield self._buffers[index]
        self._copied[index].record()
