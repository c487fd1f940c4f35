"""The only two ways between host and device in a step: arrays go up one by one, results come down together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Transfer:
    """Copies to and from ``device``; ``read_back`` is where a step waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def upload(self, array: NDArray[np.generic]) -> Tensor:
        """Copy a host array to the device; on a CPU too, for the host's buffers are filled again."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cpu":
            return tensor.clone()
        return tensor.pin_memory().to(self._device, non_blocking=True)  # torch keeps the pinned copy until it is read

    def read_back(self, groups: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return the same groups of tensors on the host, after one wait for the device."""
        if self._device.type == "cpu":
            return [list(group) for group in groups]
        tensors = [tensor for group in groups for tensor in group]
        copies = iter(unpack(pack(tensors).cpu(), tensors)) if tensors else iter(())
        return [[next(copies) for _ in group] for group in groups]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all ``tensors``, one after the other, on their device."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def unpack(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut what ``pack`` made into tensors of the shapes and dtypes of ``like``, which may be on another device."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in like]
    parts: Any = torch.split(data, sizes)  # a clone is aligned, a part need not be
    return [part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
