"""How a linear layer stores and applies its weight, apart from what the layer is for."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor


class QuantMethod(ABC):
    """Turns a full-precision weight into what ``apply`` and ``rows`` read, once, at load."""

    name: str

    layout: str | None = None
    """What ``pack`` writes, its version and whatever of the machine it depends on; None if packing is not worth saving.

    Packed tensors saved under another layout are never read.
    """

    @abstractmethod
    def pack(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the stored tensors for ``weight`` [out, in] (any float dtype); none of them shares its memory.

        ``dtype`` is that of the activations. The result is what the packed-weight cache
        saves, so ``pack`` must be a pure function.
        """

    @abstractmethod
    def apply(self, x: Tensor, packed: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; x [T, in], result [T, out] in x's dtype.

        Row i of the result depends on row i of x alone, bit for bit, whatever T is.
        """

    def dense_weight(self, packed: Mapping[str, Tensor]) -> Tensor | None:
        """Return the weight [out, in] in the activations' dtype if that is how it is kept, else None."""
        return None

    @abstractmethod
    def rows(self, packed: Mapping[str, Tensor], row_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows ``row_ids`` [T] int64 of the weight as [T, in]: the embedding lookup of a tied head."""
