"""Token embeddings: a table of their own, or the rows of a tied output head."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from aserve.layers.linear import Linear
from aserve.layers.weighted import WeightedLayer, WeightFormat, WeightSlot


class TokenEmbedding(Protocol):
    """Looks up token ids [T] int64 and returns [T, hidden] in the activations' dtype."""

    def __call__(self, token_ids: Tensor) -> Tensor: ...


class Embedding(WeightedLayer):
    """A table that serves lookups alone, so it is never quantised."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, weights: WeightFormat) -> None:
        super().__init__(name, weights)
        self.shape = (vocab_size, hidden_size)

    def slots(self) -> dict[str, WeightSlot]:
        return {f"{self.name}.weight": WeightSlot(self.shape, self._write)}

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.tensors["weight"])

    def _write(self, weight: Tensor) -> None:
        self.tensors["weight"] = weight.to(self.weights.device, self.weights.dtype, copy=True)


class TiedEmbedding:
    """Reads its rows from the output head, whose packed weight is the only copy."""

    def __init__(self, head: Linear) -> None:
        self._head = head

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._head.rows(token_ids)
