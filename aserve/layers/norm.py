"""The weight of an RMS norm; the operators compute it."""

from torch import Tensor

from aserve.layers.weighted import WeightedLayer, WeightFormat, WeightSlot


class NormWeight(WeightedLayer):
    """One factor per channel."""

    def __init__(self, name: str, size: int, weights: WeightFormat) -> None:
        super().__init__(name, weights)
        self.size = size

    @property
    def weight(self) -> Tensor:
        """[size], in the activations' dtype."""
        return self.tensors["weight"]

    def slots(self) -> dict[str, WeightSlot]:
        return {f"{self.name}.weight": WeightSlot((self.size,), self._write)}

    def _write(self, weight: Tensor) -> None:
        self.tensors["weight"] = weight.to(self.weights.device, self.weights.dtype, copy=True)
