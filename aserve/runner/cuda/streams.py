"""The two streams of a GPU and the buffers that cross between host and device on them.

Invariant: a pinned buffer has one owner and is rewritten only after the event of its last reader; so is its twin on
the device, which the upload stream rewrites only after the compute stream has read it.
"""

from collections import deque
from dataclasses import InitVar, dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.runner.cuda.step_arrays import ArrayLayout, Fields

NUM_SLOTS = 3  # one that the host fills, one on its way, one that the device reads


@dataclass(slots=True)
class UploadSlot:
    """A pinned buffer of int32 words and its twin on the device."""

    host: Tensor
    device: Tensor
    layout: InitVar[ArrayLayout]
    words: NDArray[np.int32] = field(init=False)  # the pinned memory
    arrays: Fields = field(init=False)  # views of its beginning
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    consumed: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def __post_init__(self, layout: ArrayLayout) -> None:
        self.words = self.host.numpy()
        self.arrays = layout.host_views(self.words)


class UploadSlots:
    """Slots in turn; each step fills one, sends it with one copy on the upload stream, and reads it on the other."""

    def __init__(
        self, layout: ArrayLayout, num_spare_words: int, device: torch.device, compute: torch.cuda.Stream
    ) -> None:
        self._layout = layout
        self._device = device
        self._compute = compute
        self._upload = torch.cuda.Stream(device)
        self._slots = deque(self._allocate(layout.num_words + num_spare_words) for _ in range(NUM_SLOTS))

    def acquire(self, num_words: int) -> UploadSlot:
        """Return the next slot, with room for ``num_words``; its pinned memory may be written."""
        slot = self._slots.popleft()
        slot.copied.synchronize()
        if num_words > len(slot.words):
            slot = self._allocate(1 << (num_words - 1).bit_length())
        self._slots.append(slot)
        return slot

    def send(self, slot: UploadSlot, num_words: int) -> Tensor:
        """Copy the first words to the device and let the compute stream, the current one, wait for them there."""
        self._upload.wait_event(slot.consumed)
        target = slot.device[:num_words]
        torch.cuda.set_stream(self._upload)
        target.copy_(slot.host[:num_words], non_blocking=True)
        torch.cuda.set_stream(self._compute)
        slot.copied.record(self._upload)
        self._compute.wait_event(slot.copied)
        return target

    def release(self, slot: UploadSlot) -> None:
        """Note that the compute stream needs nothing of the slot after what was enqueued so far."""
        slot.consumed.record(self._compute)

    def _allocate(self, num_words: int) -> UploadSlot:
        host = torch.zeros(num_words, dtype=torch.int32, pin_memory=True)  # what no step has filled must be valid too
        with torch.cuda.stream(self._upload):
            device = torch.zeros(num_words, dtype=torch.int32, device=self._device)
        device.record_stream(self._compute)
        return UploadSlot(host, device, self._layout)
