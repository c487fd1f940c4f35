"""How a linear layer stores and applies its weight, apart from what the layer is for."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class QuantMethod(ABC):
    """Turns a full-precision weight into what ``apply`` reads, once, at load."""

    name: str

    @abstractmethod
    def pack(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the stored tensors for ``weight`` [out, in] (any float dtype).

        ``dtype`` is that of the activations. The result is what the packed-weight cache
        saves, so ``pack`` must be a pure function.
        """

    @abstractmethod
    def apply(self, x: Tensor, packed: dict[str, Tensor], bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; x [T, in], result [T, out] in x's dtype.

        Row i of the result depends on row i of x alone, bit for bit, whatever T is.
        """
