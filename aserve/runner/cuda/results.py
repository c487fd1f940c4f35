"""Pinned memory that sampled tokens come back to."""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.runner.cuda.streams import NUM_SLOTS
from aserve.runner.transfer import pack, unpack
from aserve.sampling.sampler import BAD_LOGITS
from aserve.scheduler.plan import StepTokens


@dataclass(slots=True)
class Download:
    """A copy on its way: valid once ``done`` has happened, until ``report`` has been called."""

    done: torch.cuda.Event
    report: Callable[[], StepTokens]


class Downloads:
    """Starts copies to the host on the compute stream, which is the current one."""

    def __init__(self, max_num_sampled: int, compute: torch.cuda.Stream) -> None:
        self._max_num_sampled = max_num_sampled
        self._compute = compute
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()  # pinned [max_num_sampled] int32 each
        for _ in range(NUM_SLOTS):  # pinning memory later would make a step wait for the device
            self._free.put(self._allocate())

    def plain(self, step_id: int, token_ids: Tensor) -> Download:
        """Fetch ``token_ids`` [N] int32, in which -1 marks a row without usable logits."""
        count = len(token_ids)
        buffer = self._take()
        buffer[:count].copy_(token_ids, non_blocking=True)

        def report() -> StepTokens:
            tokens: list[int] = buffer[:count].tolist()
            self._free.put(buffer)
            errors = {place: BAD_LOGITS for place, token in enumerate(tokens) if token < 0} if -1 in tokens else {}
            return StepTokens(step_id, tokens, errors=errors)

        return Download(self._record(), report)

    def groups(
        self, tensors: Sequence[Sequence[Tensor]], report: Callable[[list[list[Tensor]]], StepTokens]
    ) -> Download:
        """Fetch groups of tensors of any shape; ``report`` gets them on the host."""
        flat = [tensor for group in tensors for tensor in group]
        packed = pack(flat)
        # Pinned memory of torch's own cache, which is not handed out again before this copy is done.
        on_host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
        on_host.copy_(packed, non_blocking=True)

        def read() -> StepTokens:
            copies = iter(unpack(on_host, flat))
            return report([[next(copies) for _ in group] for group in tensors])

        return Download(self._record(), read)

    def nothing(self, step_id: int) -> Download:
        """Wait for a step that samples nothing."""
        return Download(self._record(), lambda: StepTokens(step_id, []))

    def _take(self) -> Tensor:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return self._allocate()

    def _allocate(self) -> Tensor:
        return torch.empty(self._max_num_sampled, dtype=torch.int32, pin_memory=True)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps instead of spinning
        event.record(self._compute)
        return event
