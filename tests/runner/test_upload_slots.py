"""Pinned slots and their twins on the device: nothing is rewritten before its last reader has read it.

Streams are played: what is enqueued runs only when something waits for it, in the order that hurts most.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aserve.runner.cuda import streams
from aserve.runner.cuda.step_arrays import ArrayLayout
from aserve.runner.cuda.streams import NUM_SLOTS, UploadSlot, UploadSlots

LAYOUT = ArrayLayout(max_num_seqs=2)


class PlayedStream:
    """Work that is still to be done, in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.pending: list[Callable[[], None]] = []

    def wait_event(self, event: "PlayedEvent") -> None:
        self.pending.append(event.waiting())

    def run_until(self, mark: Callable[[], None] | None) -> None:
        while self.pending:
            work = self.pending.pop(0)
            work()
            if work is mark:
                return


class PlayedEvent:
    """Done when its stream has come to where it was recorded."""

    def __init__(self) -> None:
        self._stream: PlayedStream | None = None
        self._mark: Callable[[], None] = lambda: None

    def record(self, stream: PlayedStream) -> None:
        self._stream, self._mark = stream, lambda: None
        stream.pending.append(self._mark)

    def waiting(self) -> Callable[[], None]:
        """Return what waits for the latest record, whatever is recorded later."""
        stream, mark = self._stream, self._mark

        def wait() -> None:
            if stream is not None and mark in stream.pending:
                stream.run_until(mark)

        return wait

    def synchronize(self) -> None:
        self.waiting()()


class PlayedTwin:
    """Memory on the device: a copy to it is work of the current stream, and reads the host's memory when it is done."""

    def __init__(self, num_words: int, current: list[PlayedStream]) -> None:
        self.words = np.zeros(num_words, np.int32)
        self._current = current

    def __getitem__(self, words: slice) -> "PlayedTwin":
        return self

    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        host = source.numpy()
        self._current[0].pending.append(lambda: self.words.__setitem__(slice(len(host)), host))


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[PlayedStream]:
    current = [PlayedStream()]
    monkeypatch.setattr(streams.torch.cuda, "Stream", PlayedStream)
    monkeypatch.setattr(streams.torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))

    def allocate(self: UploadSlots, num_words: int) -> UploadSlot:
        host, twin = torch.zeros(num_words, dtype=torch.int32), PlayedTwin(num_words, current)
        return UploadSlot(host, twin, LAYOUT, PlayedEvent(), PlayedEvent())  # type: ignore[arg-type]

    monkeypatch.setattr(UploadSlots, "_allocate", allocate)
    return current


@pytest.mark.parametrize("hasty", ["upload", "compute"])
@pytest.mark.parametrize("sizes", [[4], [4, 4, 600, 4, 1500]], ids=["alike", "growing"])
def test_every_step_reads_what_was_written_for_it(current: list[PlayedStream], hasty: str, sizes: list[int]) -> None:
    compute = current[0]
    slots = UploadSlots(LAYOUT, 8, torch.device("cpu"), compute)  # type: ignore[arg-type]
    upload: PlayedStream = slots._upload  # type: ignore[assignment]
    seen: list[int] = []
    num_steps = 4 * NUM_SLOTS + 1
    for step in range(num_steps):
        slot = slots.acquire(LAYOUT.num_words + sizes[step % len(sizes)])
        slot.words[:] = step
        twin: PlayedTwin = slots.send(slot, LAYOUT.num_words + 4)  # type: ignore[assignment]
        compute.pending.append(lambda twin=twin: seen.append(int(twin.words[0])))  # type: ignore[misc]
        slots.release(slot)
        assert current[0] is compute
        if hasty == "upload":  # copies are made as early as the events allow
            upload.run_until(None)
    compute.run_until(None)
    assert seen == list(range(num_steps))


def test_the_host_is_ahead_by_all_slots_but_never_waits_before(current: list[PlayedStream]) -> None:
    slots = UploadSlots(LAYOUT, 8, torch.device("cpu"), current[0])  # type: ignore[arg-type]
    upload: PlayedStream = slots._upload  # type: ignore[assignment]
    lens = []
    for _ in range(NUM_SLOTS):
        slot = slots.acquire(LAYOUT.num_words)
        slots.send(slot, LAYOUT.num_words)
        slots.release(slot)
        lens.append(len(upload.pending))
    assert lens == sorted(set(lens)), "nothing has run yet"
    slots.acquire(LAYOUT.num_words)
    assert len(upload.pending) < lens[-1], "the first slot is free again because its copy has been made"
