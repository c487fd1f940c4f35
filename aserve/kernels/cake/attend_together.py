"""The loop of the split decode kernel over blocks of keys, which all warps of a program share."""

import triton
import triton.language as tl

from aserve.kernels.cake.kv_blocks import find_keys, load_block
from aserve.kernels.cake.softmax import cap_scores, score_factor


@triton.jit
def attend_together(
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
    """Go through ``count`` blocks from key ``first`` on; return the softmax's state for queries [R, WIDTH].

    These are a row's greatest score and denominator, [R] each, and its output [R, WIDTH], not yet divided. WARPS is for
    ``attend_apart``, which takes this one's place.
    """
    ROWS: tl.constexpr = queries.shape[0]
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, WIDTH], tl.float32)
    factor = score_factor(scale, HAS_SOFTCAP)
    for i in range(0, count):
        positions = first + i * BLOCK_LEN + tl.arange(0, BLOCK_LEN)
        pages, in_page = find_keys(table_row, positions, key_len, kv_head, PAGE_SIZE, TOKEN_STRIDE, HEAD_STRIDE)
        block_keys = load_block(keys, key_blocks, pages, in_page, None, HEAD_DIM, WIDTH, PAGE_STRIDE, PER_WORD, FACTOR)
        scores = tl.dot(queries, tl.trans(block_keys), input_precision="ieee")
        scores = cap_scores(scores, scale, softcap, HAS_SOFTCAP)
        is_seen = (positions < key_len)[None, :]
        if QUERIES > 1:
            distance = (key_len - num_queries + places)[:, None] - positions[None, :]
            is_seen = is_seen & (distance >= 0) & (distance < window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, 1) * factor)
        offset = new_greatest
        if QUERIES > 1:  # a row may have seen no key yet
            offset = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        kept = tl.exp2(greatest - offset)
        weights = tl.exp2(scores * factor - offset[:, None])
        denominator = denominator * kept + tl.sum(weights, 1)
        block_values = load_block(
            values, value_blocks, pages, in_page, None, HEAD_DIM, WIDTH, PAGE_STRIDE, PER_WORD, FACTOR
        )
        output = tl.dot(weights.to(FACTOR), block_values, output * kept[:, None], input_precision="ieee")
        greatest = new_greatest
    return greatest, denominator, output
