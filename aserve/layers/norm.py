"""The weight of an RMS norm; the operators compute it."""

import torch
from torch import Tensor

from aserve.layers.weighted import WeightedLayer, WeightFormat, WeightSlot


class NormWeight(WeightedLayer):
    """One factor per channel.

    ``has_unit_offset``: the checkpoint holds factors less 1. They are kept as float32 whatever the activations are,
    since the sum with 1 would lose most of a small weight's digits.
    """

    def __init__(self, name: str, size: int, weights: WeightFormat, *, has_unit_offset: bool = False) -> None:
        super().__init__(name, weights)
        self.size = size
        self.has_unit_offset = has_unit_offset

    @property
    def weight(self) -> Tensor:
        """[size], in the activations' dtype or, with a unit offset, in float32."""
        return self.tensors["weight"]

    @property
    def neutral(self) -> float:
        """What the checkpoint holds of a norm that changes no channel."""
        return 0.0 if self.has_unit_offset else 1.0

    def slots(self) -> dict[str, WeightSlot]:
        return {f"{self.name}.weight": WeightSlot((self.size,), self._write)}

    def _write(self, weight: Tensor) -> None:
        if self.has_unit_offset:
            self.tensors["weight"] = 1 + weight.to(self.weights.device, torch.float32)
            return
        self.tensors["weight"] = weight.to(self.weights.device, self.weights.dtype, copy=True)
