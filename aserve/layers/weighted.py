"""What every layer with weights offers to loading: slots for checkpoint tensors, and what it keeps of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.quantization.base import QuantMethod


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How and where all layers of one model keep their weights; ``dtype`` is that of the activations."""

    method: QuantMethod
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of one checkpoint tensor: the whole shape it has in the file, and who takes it.

    A scalar may come in several shapes; ``other_shapes`` are those beside ``shape``.
    A sharded layer takes its own part inside ``write``, so loading never knows about shards. ``write`` may be handed
    a view of a mapped file and must copy what it keeps. ``covers`` names slots that need no tensor of their own where
    this one has been written.
    """

    shape: tuple[int, ...]
    write: Callable[[Tensor], None]
    is_optional: bool = False
    covers: tuple[str, ...] = ()
    other_shapes: tuple[tuple[int, ...], ...] = ()


class WeightedLayer(ABC):
    """A layer whose kept tensors are exactly ``tensors``: filled by the slots, or restored from the packed cache."""

    def __init__(self, name: str, weights: WeightFormat) -> None:
        self.name = name
        self.weights = weights
        self.tensors: dict[str, Tensor] = {}

    @abstractmethod
    def slots(self) -> dict[str, WeightSlot]:
        """Map the checkpoint's tensor names to their slots."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Copy what ``tensors`` held in an earlier run.

        Memory of its own is aligned, which views of a mapped file are not and kernels want, and outlives the file.
        """
        self.tensors = {key: tensor.to(self.weights.device, copy=True) for key, tensor in tensors.items()}
