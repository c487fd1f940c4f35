"""Weights as they are, in the activations' dtype."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.quantization.base import QuantMethod


class Unquantized(QuantMethod):
    """torch's own linear; how a row is rounded may depend on T, because BLAS picks its kernel by shape."""

    name = "none"

    def pack(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight": weight.to(dtype, copy=True)}

    def apply(self, x: Tensor, packed: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        return F.linear(x, packed["weight"], bias)

    def dense_weight(self, packed: Mapping[str, Tensor]) -> Tensor:
        return packed["weight"]

    def rows(self, packed: Mapping[str, Tensor], row_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(row_ids, packed["weight"]).to(dtype)
