"""Launch parameters of the medium linear layers that are worth a measurement on an H200.

Which share of a layer a program takes is ranked by a rough model of the chip; what the model cannot tell apart, such
as how deep the copies are staged, is left to the measurement.
"""

from collections.abc import Iterator
from dataclasses import replace

import triton

from aserve.kernels.gpu.medium_linear_launch import MediumLinearLaunch, MediumLinearShape

NUM_UNITS = 132  # multiprocessors
SHARED_BYTES = 227 << 10  # that a program can have
HALF_BYTES = 113 << 10  # that each of two programs on one multiprocessor can have
REGISTERS = 1 << 16  # of a multiprocessor
MEMORY_BYTES_PER_US = 4.2e6
CACHE_BYTES_PER_US = 6e6  # read by all multiprocessors
UNIT_BYTES_PER_US = 9e4  # read by one
PRODUCTS_PER_US = 3.2e8
PARTS_US = 2.0  # that the kernel takes which adds up parts
VALUE_BYTES, SUM_BYTES = 2, 4

TOKEN_TILES = {
    16: [(16, 1)],
    32: [(32, 1)],
    64: [(64, 1)],
    96: [(32, 3)],
    128: [(128, 1)],
    192: [(64, 3), (128, 1)],
    256: [(256, 1), (128, 1)],
    320: [(64, 5)],
}
"""(block_tokens, token_blocks) for a bucket: all tokens, so that the weight is read once, or half of many."""

MAX_SUMS = 160  # that a thread keeps
OTHER_REGISTERS = 32  # of a thread
MIN_STEPS, MIN_STAGES, MAX_STAGES = 4, 3, 6
MAX_SPLIT_PROGRAMS = 4 * NUM_UNITS  # above which there are enough without sharing the width
AHEAD_COLUMNS = 256  # of each row that are asked for while the kernel before is at work
NUM_SHARES = 5


def candidates(shape: MediumLinearShape) -> list[MediumLinearLaunch]:
    """Return a dozen launches at most; the first is the model's guess."""
    shares = sorted(_shares(shape), key=lambda launch: _estimate_us(shape, launch))[:NUM_SHARES]
    launches = dict.fromkeys(staged for share in shares for staged in _stages(shape, share))
    guess = next(iter(launches))
    return [*launches, replace(guess, ahead=0), replace(guess, ahead=2 * guess.ahead)]


def _shares(shape: MediumLinearShape) -> Iterator[MediumLinearLaunch]:
    """Yield who multiplies what: rows and tokens of a program, and among how many the width is shared."""
    for block_tokens, token_blocks in TOKEN_TILES[shape.max_tokens]:
        for num_rows in (64, 128, 256):
            num_tokens = block_tokens * token_blocks
            num_warps = 8 if num_rows == 256 or num_rows * num_tokens >= 128 * 64 else 4
            if num_rows * num_tokens > MAX_SUMS * 32 * num_warps:
                continue
            for num_parts in (1, 2, 4, 8):
                is_joint = shape.is_gated and num_parts == 1  # gate and up rows in one program
                if is_joint and num_rows == 64:  # halves of which the matrix units cannot take
                    continue
                block_outputs = num_rows // 2 if is_joint else num_rows
                if num_parts > 1 and shape.num_outputs * num_parts > MAX_SPLIT_PROGRAMS * block_outputs:
                    continue
                yield MediumLinearLaunch(
                    block_outputs, block_tokens, token_blocks, num_warps=num_warps, num_parts=num_parts
                )


def _stages(shape: MediumLinearShape, share: MediumLinearLaunch) -> Iterator[MediumLinearLaunch]:
    """Yield one program on a multiprocessor with deep stages, and two with shallow ones."""
    num_rows, num_tokens = _program_rows(shape, share), share.block_tokens * share.token_blocks
    registers = num_rows * num_tokens + OTHER_REGISTERS * 32 * share.num_warps
    for num_bytes in (SHARED_BYTES, HALF_BYTES):
        if num_bytes == HALF_BYTES and 2 * registers > REGISTERS:
            continue
        for block_width in (128, 64):
            num_stages = min((num_bytes - 256) // ((num_rows + num_tokens) * block_width * VALUE_BYTES), MAX_STAGES)
            num_steps = triton.cdiv(shape.width, block_width * share.num_parts)
            if num_stages >= MIN_STAGES and (num_steps >= MIN_STEPS or block_width == 64):
                ahead = AHEAD_COLUMNS // block_width
                yield replace(share, block_width=block_width, num_stages=num_stages, ahead=ahead)
                break


def _program_rows(shape: MediumLinearShape, launch: MediumLinearLaunch) -> int:
    """Return how many rows of the weight a program reads."""
    return launch.block_outputs * (2 if shape.is_gated and launch.num_parts == 1 else 1)


def _estimate_us(shape: MediumLinearShape, launch: MediumLinearLaunch) -> float:
    """Return the longest of what memory, cache and matrix units take, and a little of the rest to tell ties apart."""
    weight_rows = shape.num_outputs * (2 if shape.is_gated else 1)
    num_tokens, num_rows = launch.block_tokens * launch.token_blocks, _program_rows(shape, launch)
    num_programs = triton.cdiv(shape.max_tokens, num_tokens) * triton.cdiv(weight_rows, num_rows) * launch.num_parts
    read = num_programs * (num_rows + num_tokens) * shape.width // launch.num_parts * VALUE_BYTES
    parts = 2 * launch.num_parts * shape.max_tokens * weight_rows * SUM_BYTES if launch.num_parts > 1 else 0
    imbalance = triton.cdiv(num_programs, NUM_UNITS) * NUM_UNITS / num_programs
    memory_us = weight_rows * shape.width * VALUE_BYTES / MEMORY_BYTES_PER_US
    cache_us = read / min(CACHE_BYTES_PER_US, num_programs * UNIT_BYTES_PER_US) + parts / CACHE_BYTES_PER_US
    matrix_us = (
        imbalance
        * weight_rows
        * shape.width
        * num_tokens
        * (triton.cdiv(shape.max_tokens, num_tokens))
        / PRODUCTS_PER_US
    )
    slowest_us = max(memory_us, cache_us, matrix_us)
    return float(slowest_us + 0.1 * (cache_us + matrix_us) + (PARTS_US if launch.num_parts > 1 else 0.0))
