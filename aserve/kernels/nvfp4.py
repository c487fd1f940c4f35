"""Keys and values in nvfp4: floats of 4 bits, whose blocks of 16 along a head share a scale of 8 bits.

An element (e2m1) is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Two lie in a byte,
the first in its low half. A block's scale is e4m3. What both stand for is multiplied with the scale of the layer, or of
its KV head, as values in e4m3 are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NVFP4 = torch.float4_e2m1fn_x2  # names the format; pages are bytes
BLOCK = 16
HEAD_GRAIN = 32  # heads are multiples of it: of 16 bytes, in halves of whole blocks
MAX_ELEMENT = 6.0
MAX_BLOCK_SCALE = 448.0


def element_bytes(dtype: torch.dtype) -> float:
    """Return the bytes of an element of a pool's dtype, with its part of a block's scale."""
    return 1 / 2 + 1 / BLOCK if dtype == NVFP4 else dtype.itemsize


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The scales of a layer's blocks, e4m3 [pages, page_size, K, D / 16] each, beside pages of [..., D / 2] bytes."""

    key: Tensor
    value: Tensor


def quantise(x: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed elements, uint8 [..., D / 2], and block scales, e4m3 [..., D / 16], of x [..., D] / scale.

    Both are rounded to the nearest, ties to even; what is too large becomes the largest there is.
    """
    blocks = (x.float() / scale).reshape(*x.shape[:-1], -1, BLOCK)
    block_scales = blocks.abs().amax(-1) / MAX_ELEMENT
    block_scales = block_scales.clamp(max=MAX_BLOCK_SCALE).to(torch.float8_e4m3fn)
    divisors = block_scales.float().unsqueeze(-1)
    codes = _round_to_codes(torch.where(divisors > 0, blocks / divisors, 0.0)).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, block_scales


def dequantise(packed: Tensor, block_scales: Tensor) -> Tensor:
    """Return what packed elements [..., D / 2] and block scales [..., D / 16] stand for, float32 [..., D]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int16)
    # The bits of an element are those of a float16, its exponent 14 too small.
    elements = ((codes & 8) << 12 | (codes & 7) << 9).view(torch.float16).float() * 2**14
    blocks = elements.view(*block_scales.shape, BLOCK)
    return (blocks * block_scales.float().unsqueeze(-1)).flatten(-2)


def _round_to_codes(x: Tensor) -> Tensor:
    """Return the nearest element of each of ``x`` as its 4 bits."""
    size = x.abs()
    codes = (size > 0.25).to(torch.uint8)
    for middle, is_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        codes += (size >= middle) if is_up else (size > middle)
    return codes | (x < 0).to(torch.uint8) << 3
