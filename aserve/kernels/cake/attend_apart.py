"""The loop of the split decode kernel for packed keys and values and few rows: warps attend to keys of their own.

They do not wait for each other until the end, when their results are merged as those of programs are. What a thread
unpacks are parts of its own warp's products, so it never passes through shared memory.
"""

import triton
import triton.language as tl

from aserve.kernels.cake.kv_blocks import find_keys
from aserve.kernels.cake.kv_factors import (
    arrange_channels,
    arrange_weights,
    load_keys,
    load_values,
    restore_channels,
)
from aserve.kernels.cake.softmax import cap_scores, score_factor


@triton.jit
def attend_apart(
    queries,
    keys,
    values,
    key_blocks,
    value_blocks,
    table_row,
    first,
    count,
    key_len,
    kv_head,
    places,
    num_queries,
    window,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PER_WORD: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    FACTOR: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return the same as ``attend_together``.

    Scores are [warps, R, keys of a warp]. The second product is transposed: it has 16 rows at least, but 8 columns.
    """
    ROWS: tl.constexpr = queries.shape[0]
    SHARE: tl.constexpr = BLOCK_LEN // WARPS
    IS_COMPILED: tl.constexpr = FACTOR == tl.float16  # noqa: SIM300 - no constant; see factor_dtype
    queries = tl.broadcast_to(arrange_channels(queries, PER_WORD)[None, :, :], [WARPS, ROWS, WIDTH])
    scale *= 1 / 256  # elements are larger by this than ``load_scale`` expects
    factor = score_factor(scale, HAS_SOFTCAP)
    greatest = tl.full([WARPS, ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([WARPS, ROWS], tl.float32)
    output = tl.zeros([WARPS, WIDTH, ROWS], tl.float32)
    for begin in range(first, first + count * BLOCK_LEN, BLOCK_LEN):
        positions = begin + tl.arange(0, BLOCK_LEN)
        pages, in_page = find_keys(table_row, positions, key_len, kv_head, PAGE_SIZE, TOKEN_STRIDE, HEAD_STRIDE)
        block_keys = load_keys(keys, key_blocks, pages, in_page, HEAD_DIM, WIDTH, PAGE_STRIDE, PER_WORD, IS_COMPILED)
        block_keys = tl.reshape(block_keys, [WARPS, SHARE, WIDTH]).to(FACTOR)
        scores = tl.dot(queries, tl.permute(block_keys, (0, 2, 1)), input_precision="ieee")
        scores = cap_scores(scores, scale, softcap, HAS_SOFTCAP)
        is_seen = tl.reshape(positions < key_len, [WARPS, SHARE])[:, None, :]
        if QUERIES > 1:
            distance = (key_len - num_queries + places)[:, None] - positions[None, :]
            is_near = tl.permute(tl.reshape((distance >= 0) & (distance < window), [ROWS, WARPS, SHARE]), (1, 0, 2))
            is_seen = is_seen & is_near
        scores = tl.where(is_seen, scores, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, 2) * factor)
        offset = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)  # a warp may have seen no key yet
        kept = tl.exp2(greatest - offset)
        weights = tl.exp2(scores * factor - offset[:, :, None])
        denominator = denominator * kept + tl.sum(weights, 2)
        block_values = load_values(
            values, value_blocks, pages, in_page, HEAD_DIM, WIDTH, PAGE_STRIDE, PER_WORD, IS_COMPILED
        )
        block_values = tl.reshape(block_values, [WARPS, SHARE, WIDTH]).to(FACTOR)
        weights = tl.permute(arrange_weights(weights.to(FACTOR), PER_WORD), (0, 2, 1))
        block_values = tl.permute(block_values, (0, 2, 1))
        output = tl.dot(block_values, weights, output * kept[:, None, :], input_precision="ieee")
        greatest = new_greatest
    overall = tl.max(greatest, 0)
    offset = tl.where(overall == float("-inf"), 0.0, overall)
    kept = tl.exp2(greatest - offset[None, :])
    output *= 1 / 256
    output = restore_channels(tl.trans(tl.sum(output * kept[:, None, :], 0)))
    return overall, tl.sum(denominator * kept, 0), output
