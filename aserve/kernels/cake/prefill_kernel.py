"""Paged prefill: tiles of queries go through their keys block by block; specialised by its constants.

All heads of a group stand in one tile, so short chunks fill it too and each key is read once for all of them. Blocks
that every row of a tile sees in full take no mask; only those at the diagonal and at the window's far edge do.
"""

import triton
import triton.language as tl

from aserve.kernels.cake.factors import to_factors
from aserve.kernels.cake.kv_blocks import find_block_places, find_channels, load_block, load_pages, load_scale
from aserve.kernels.cake.softmax import LN_2, add_sinks, cap_scores, score_factor


# Tables may begin at any element; specialised on that, the kernels would be compiled again while serving.
@triton.jit(
    do_not_specialize=[
        "lse",
        "page_table",
        "rows",
        "key_lens",
        "cu_query_lens",
        "tile_chunks",
        "tile_firsts",
        "sinks",
        "table_stride",
        "window",
    ]
)
def paged_prefill(
    q,
    out,
    lse,
    keys,
    values,
    key_blocks,
    value_blocks,
    page_table,
    rows,
    key_lens,
    cu_query_lens,
    tile_chunks,
    tile_firsts,
    sinks,
    table_stride,
    window,
    scale,
    softcap,
    key_scale,
    value_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITES_LSE: tl.constexpr,
    HAS_HEAD_SCALES: tl.constexpr,
    PER_WORD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Compute a tile of a KV head: TILE_ROWS rows of a chunk's queries times GROUP heads, as ``tile_chunks`` [N] says.

    ``tile_firsts`` [N] is the tile's first row in its chunk. Chunk c has tokens cu_query_lens[c] to [c + 1] of ``q``,
    Q_STRIDE elements apart, of ``out`` [T, H, D] and of ``lse`` [T, H], in base e, and its pages in row ``rows[c]`` of
    the page table, ``table_stride`` entries apart. The strides of pages, tokens and heads count elements, or words of 8
    where PER_WORD is 8. ``window`` is in keys, only read with HAS_WINDOW; ``key_scale`` and ``value_scale`` are
    numbers, or [K].
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    chunk = tl.load(tile_chunks + tile)
    if chunk < 0:
        return
    first_row = tl.load(tile_firsts + tile)
    first_token = tl.load(cu_query_lens + chunk)
    num_queries = tl.load(cu_query_lens + chunk + 1) - first_token
    num_before = tl.load(key_lens + chunk) - num_queries  # keys before the chunk's
    table_row = page_table + tl.load(rows + chunk).to(tl.int64) * table_stride

    is_row, places, heads = _find_rows(first_row, num_queries, kv_head, GROUP, TILE_ROWS)
    positions = num_before + places  # of the queries in their sequence
    elements = find_channels(WIDTH, PER_WORD)
    is_inside = is_row[:, None] & (elements < HEAD_DIM)[None, :]
    offsets = (first_token + places).to(tl.int64) * Q_STRIDE + heads * HEAD_DIM
    queries = tl.load(q + (offsets[:, None] + elements[None, :]), mask=is_inside, other=0.0)
    queries = to_factors(queries, FACTOR)

    scale *= load_scale(key_scale, kv_head, HAS_HEAD_SCALES, PER_WORD)
    greatest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([TILE_ROWS], tl.float32)
    output = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
    first_position = num_before + first_row // GROUP
    last_position = num_before + (tl.minimum(first_row + TILE_ROWS, num_queries * GROUP) - 1) // GROUP
    first_key, stop = 0, last_position + 1  # what the tile sees
    begin = 0  # of the blocks that all rows see in full
    if HAS_WINDOW:
        first_key = tl.maximum(first_position + 1 - window, 0)
        begin = (tl.maximum(last_position + 1 - window, 0) + (BLOCK_LEN - 1)) // BLOCK_LEN * BLOCK_LEN
    end = tl.maximum((first_position + 1) // BLOCK_LEN * BLOCK_LEN, begin)
    for PART in tl.static_range(0 if HAS_WINDOW else 1, 3):
        if PART == 0:
            low, high = first_key // BLOCK_LEN * BLOCK_LEN, tl.minimum(begin, stop)
        elif PART == 1:
            low, high = begin, end
        else:
            low, high = end, stop
        greatest, denominator, output = _attend(
            greatest,
            denominator,
            output,
            queries,
            positions,
            low,
            high,
            first_key,
            stop,
            keys,
            values,
            key_blocks,
            value_blocks,
            table_row,
            kv_head,
            window,
            scale,
            softcap,
            HEAD_DIM,
            PAGE_STRIDE,
            TOKEN_STRIDE,
            HEAD_STRIDE,
            PAGE_SIZE,
            HAS_SOFTCAP,
            PER_WORD,
            HAS_WINDOW,
            WIDTH,
            BLOCK_LEN,
            FACTOR,
            IS_MASKED=PART != 1,
        )

    # Found again: kept until here, these would take registers from the loops.
    first_row = tl.load(tile_firsts + tile, volatile=True)
    is_row, places, heads = _find_rows(first_row, num_queries, kv_head, GROUP, TILE_ROWS)
    if HAS_SINKS:
        greatest, denominator, kept = add_sinks(greatest, denominator, sinks, heads, is_row)
        output *= kept[:, None]
    output *= (load_scale(value_scale, kv_head, HAS_HEAD_SCALES, PER_WORD) / denominator)[:, None]
    offsets = (first_token + places).to(tl.int64) * (tl.num_programs(1) * GROUP) + heads
    is_inside = is_row[:, None] & (elements < HEAD_DIM)[None, :]
    outputs = out + (offsets[:, None] * HEAD_DIM + elements[None, :])
    tl.store(outputs, output.to(out.dtype.element_ty), mask=is_inside)
    if WRITES_LSE:
        tl.store(lse + offsets, (greatest + tl.log2(denominator)) * LN_2, mask=is_row)


@triton.jit
def _find_rows(first_row, num_queries, kv_head, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Return which rows of a tile there are, and each one's query among the chunk's and head; of others the last's."""
    rows = first_row + tl.arange(0, TILE_ROWS)
    count = num_queries * GROUP
    is_row = rows < count
    rows = tl.minimum(rows, count - 1)
    return is_row, rows // GROUP, kv_head * GROUP + rows % GROUP


@triton.jit
def _attend(
    greatest,
    denominator,
    output,
    queries,
    positions,
    begin,
    end,
    first_key,
    stop,
    keys,
    values,
    key_blocks,
    value_blocks,
    table_row,
    kv_head,
    window,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PER_WORD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    FACTOR: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Go through the blocks from ``begin`` on, a multiple of BLOCK_LEN; return the softmax's state after them."""
    factor = score_factor(scale, HAS_SOFTCAP)
    # Loaded a block ahead: the compiler starts loads that wait for another of their own turn only one turn early.
    pages = load_pages(table_row, begin, end, BLOCK_LEN, PAGE_SIZE)
    for first in range(begin, end, BLOCK_LEN):
        first = tl.multiple_of(first, BLOCK_LEN)
        block = first + tl.arange(0, BLOCK_LEN)
        is_key = (block >= first_key) & (block < stop) if IS_MASKED else None
        places = find_block_places(first, kv_head, BLOCK_LEN, PAGE_SIZE, TOKEN_STRIDE, HEAD_STRIDE)
        next_pages = load_pages(table_row, first + BLOCK_LEN, end, BLOCK_LEN, PAGE_SIZE)
        block_keys = load_block(keys, key_blocks, pages, places, is_key, HEAD_DIM, WIDTH, PAGE_STRIDE, PER_WORD, FACTOR)
        scores = tl.dot(queries, tl.trans(block_keys), input_precision="ieee")
        scores = cap_scores(scores, scale, softcap, HAS_SOFTCAP)
        if IS_MASKED:
            is_seen = block[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen &= block[None, :] > positions[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, 1) * factor)
        offset = new_greatest
        if IS_MASKED and HAS_WINDOW:  # a row may have seen no key yet
            offset = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        kept = tl.exp2(greatest - offset)
        weights = tl.exp2(scores * factor - offset[:, None])
        denominator = denominator * kept + tl.sum(weights, 1)
        block_values = load_block(
            values, value_blocks, pages, places, is_key, HEAD_DIM, WIDTH, PAGE_STRIDE, PER_WORD, FACTOR
        )
        output = tl.dot(weights.to(FACTOR), block_values, output * kept[:, None], input_precision="ieee")
        greatest = new_greatest
        pages = next_pages
    return greatest, denominator, output
