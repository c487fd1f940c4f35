"""Keys and values in nvfp4: floats of 4 bits, whose blocks of 16 along a head share a scale of 8 bits.

An element (e2m1) is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Two lie in a byte,
the first in its low half. A block's scale is e4m3. What both stand for is multiplied with the scale of the layer, or of
its KV head, as values in e4m3 are.

Of a few scales near the one that makes a block's largest element 6, a block gets that which leaves the smallest error:
with the next smaller one the largest is cut a little, with larger ones it becomes 4, near which steps are finer. On
normally distributed values a quarter of the squared error goes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NVFP4 = torch.float4_e2m1fn_x2  # names the format; pages are bytes
BLOCK = 16
HEAD_GRAIN = 32  # heads are multiples of it: of 16 bytes, in halves of whole blocks
MAX_ELEMENT = 6.0
MAX_BLOCK_SCALE = 448.0
SCALE_STEPS = (0, -1, 4, 5)  # from the e4m3 scale that makes the largest element 6; 1.5 times as much is 4 or 5 steps
LARGEST_SCALE_BITS = 126  # of 448; what follows is no number


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

    Elements are rounded to the nearest, ties to even; what is too large becomes the largest there is. Of scales that
    leave the same error the first of SCALE_STEPS is taken.
    """
    blocks = (x.float() / scale).reshape(*x.shape[:-1], -1, BLOCK)
    block_scales = (blocks.abs().amax(-1) / MAX_ELEMENT).clamp(max=MAX_BLOCK_SCALE).to(torch.float8_e4m3fn)
    usual_bits = block_scales.view(torch.uint8).to(torch.int16)
    steps = [(usual_bits + step).clamp_(0, LARGEST_SCALE_BITS).to(torch.uint8) for step in SCALE_STEPS]
    bits = torch.stack(steps)  # one call of an operator for all: of few tokens a call takes longer than its work
    codes, errors = _round_blocks(blocks, bits)
    best = errors.argmin(0, keepdim=True)
    codes = codes.gather(0, best.unsqueeze(-1).expand(1, *blocks.shape))[0].flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, bits.gather(0, best)[0].view(torch.float8_e4m3fn)


def quantise_in_halves(
    keys: Tensor, values: Tensor, feedback: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return what ``quantise`` does of keys and of values [T, K, D], both divided by their scales already.

    ``feedback`` [K, D / 2, D / 2] is that of ``KeyTransform``.
    """
    first, second = keys.float().chunk(2, dim=-1)
    # The values go with the first halves, so that there are no more calls than without a feedback.
    packed, scales = quantise(torch.cat((first, values), dim=-1), 1.0)
    half, width = first.shape[-1], keys.shape[-1]
    packed_first, packed_values = torch.split(packed, [half // 2, width // 2], dim=-1)
    first_scales, value_scales = torch.split(scales, [half // BLOCK, width // BLOCK], dim=-1)
    second = second + feed_back(dequantise(packed_first, first_scales) - first, feedback)
    packed_second, second_scales = quantise(second, 1.0)
    packed_keys = torch.cat((packed_first, packed_second), dim=-1)
    return (packed_keys, torch.cat((first_scales, second_scales), dim=-1)), (packed_values, value_scales)


def feed_back(errors: Tensor, feedback: Tensor) -> Tensor:
    """Return what errors [T, K, D / 2] of the first halves of keys add to the second halves, in the same shape."""
    return (errors.transpose(0, 1) @ feedback).transpose(0, 1)


def _round_blocks(blocks: Tensor, scale_bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of blocks [..., 16] with N scales each, of bits [N, ...], and the sums of their squared errors.

    Codes are [N, ..., 16], sums [N, ...].
    """
    divisors = scale_bits.view(torch.float8_e4m3fn).float().unsqueeze(-1)
    codes = _round_to_codes(torch.where(divisors > 0, blocks / divisors, 0.0))
    return codes, (_elements(codes) * divisors - blocks).square().sum(-1)


def dequantise(packed: Tensor, block_scales: Tensor) -> Tensor:
    """Return what packed elements [..., D / 2] and block scales [..., D / 16] stand for, float32 [..., D]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1)
    blocks = _elements(codes).view(*block_scales.shape, BLOCK)
    return (blocks * block_scales.float().unsqueeze(-1)).flatten(-2)


def _elements(codes: Tensor) -> Tensor:
    """Return what 4 bits each stand for, float32."""
    codes = codes.to(torch.int16)
    # The bits of an element are those of a float16, its exponent 14 too small.
    return ((codes & 8) << 12 | (codes & 7) << 9).view(torch.float16).float() * 2**14


def _round_to_codes(x: Tensor) -> Tensor:
    """Return the nearest element of each of ``x`` as its 4 bits."""
    size = x.abs()
    codes = (size > 0.25).to(torch.uint8)
    for middle, is_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        codes += (size >= middle) if is_up else (size > middle)
    return codes | (x < 0).to(torch.uint8) << 3
