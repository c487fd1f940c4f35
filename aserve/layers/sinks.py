"""Learned logits, one a query head, that take part in the softmax of attention and have no value."""

import torch
from torch import Tensor

from aserve.layers.weighted import WeightedLayer, WeightFormat, WeightSlot


class AttentionSinks(WeightedLayer):
    """``logits`` [H] float32 is one tensor from the start, which a layer's AttentionSpec holds; loading fills it."""

    def __init__(self, name: str, num_heads: int, weights: WeightFormat) -> None:
        super().__init__(name, weights)
        self.logits = torch.zeros(num_heads, device=weights.device)
        self.tensors["logits"] = self.logits

    def slots(self) -> dict[str, WeightSlot]:
        return {self.name: WeightSlot((len(self.logits),), self._write)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._write(tensors["logits"])

    def _write(self, logits: Tensor) -> None:
        self.logits.copy_(logits)
