"""int8 weights, one scale per output channel, through torch's own kernel for CPUs."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.quantization.base import QuantMethod

COLUMN_MULTIPLE = 32  # torch's kernel reads whole vectors of 16 or 32 columns, past the end of other widths
ALIGNMENT = 64  # bytes; torch's kernel crashes on activations or weights that start elsewhere
ROWS_AT_ONCE = 4096  # bounds the float32 copies made while packing


class Int8Torch(QuantMethod):
    """Weights in int8, activations in bfloat16, sums in float32.

    The kernel adds up each row in the same order whatever T is, so results are equal bit for bit alone and in a batch.
    """

    name = "int8_torch"
    layout = "int8_torch-1"

    def pack(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        blocks = [_quantize(block) for block in torch.split(weight, ROWS_AT_ONCE)]
        return {"weight": torch.cat([block for block, _ in blocks]), "scale": torch.cat([scale for _, scale in blocks])}

    def apply(self, x: Tensor, packed: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        columns, weight = x.bfloat16(), packed["weight"]
        if padding := -weight.shape[1] % COLUMN_MULTIPLE:  # no published model has such a width
            columns, weight = F.pad(columns, (0, padding)), F.pad(weight, (0, padding))
        result = torch._weight_int8pack_mm(_align(columns.contiguous()), _align(weight), packed["scale"]).to(x.dtype)
        return result if bias is None else result + bias

    def rows(self, packed: Mapping[str, Tensor], row_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return (packed["weight"][row_ids].float() * packed["scale"][row_ids].float().unsqueeze(1)).to(dtype)


def _align(x: Tensor) -> Tensor:
    """Return ``x`` or, where it is a view that starts at an odd address, a copy."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [out, in] and bfloat16 scales [out].

    The kernel takes bfloat16 scales: they are rounded first, and the weights quantised with the rounded ones.
    """
    weight = weight.float()
    scale = (weight.abs().amax(dim=1) / 127).bfloat16().clamp(min=torch.finfo(torch.bfloat16).tiny)
    return (weight / scale.float().unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8), scale
