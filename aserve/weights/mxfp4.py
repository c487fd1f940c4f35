"""MXFP4 of the OCP Microscaling Formats specification, as gpt-oss's checkpoints hold it: expanded to bfloat16, exactly.

A block is 32 numbers of 4 bits (e2m1: sign, two bits of exponent, one of mantissa), two a byte with the first in the
low half, and one scale (e8m0): a power of two, its exponent plus 127, or 255 for NaN. ``X_blocks`` [E, out, in / 32,
16] and ``X_scales`` [E, out, in / 32], both uint8, stand for the tensor X [E, in, out].
"""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCKS, SCALES = "_blocks", "_scales"  # behind the name of the tensor that the two stand for
BLOCK_LEN = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, by its lower three bits
SCALE_BIAS = 127


def expand_mxfp4(blocks: Tensor, scales: Tensor, device: torch.device) -> Tensor:
    """Return [E, in, out] bfloat16 on ``device``, a view in whose memory "in" comes last; one expert after another.

    Raises ValueError for shapes that do not fit.
    """
    if blocks.ndim != 4 or blocks.shape[3] * 2 != BLOCK_LEN:
        raise ValueError(f"blocks of {BLOCK_LEN // 2} bytes are expected, the shape is {list(blocks.shape)}")
    if scales.shape != blocks.shape[:3]:
        raise ValueError(f"the scales have the shape {list(scales.shape)}, the blocks {list(blocks.shape)}")
    num_experts, num_rows, num_blocks, _ = blocks.shape
    expanded = torch.empty(num_experts, num_rows, num_blocks * BLOCK_LEN, dtype=torch.bfloat16, device=device)
    pairs, factors = _pairs_of_byte().to(device), _factors_of_byte().to(device)
    for expert in range(num_experts):
        values = F.embedding(blocks[expert].to(device).int(), pairs).view(num_rows, num_blocks, BLOCK_LEN)
        scale = factors[scales[expert].to(device).int()].unsqueeze(2)
        torch.mul(values, scale, out=expanded[expert].view(values.shape))
    return expanded.transpose(1, 2)


def _pairs_of_byte() -> Tensor:
    """Return [256, 2] bfloat16: the two numbers of each byte."""
    numbers = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], dtype=torch.bfloat16)
    return torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)


def _factors_of_byte() -> Tensor:
    """Return [256] bfloat16: the factor of each scale."""
    return torch.tensor([*(2.0 ** (byte - SCALE_BIAS) for byte in range(255)), torch.nan], dtype=torch.bfloat16)
