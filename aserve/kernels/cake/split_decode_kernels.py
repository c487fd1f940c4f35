"""Paged decode with keys split over programs, and the merge of what they leave; specialised by its constants.

A program reads its share of blocks (decode_schedule.py), pair by pair. All heads of a group, for each of a sequence's
queries, are rows of one tile, so each key is read once. A pair that lies in one share is finished there; of one that is
cut, each program leaves a partial result. It has two places for these: the first for the end of a pair that began in
another share (or its middle), the second for the beginning of a pair that goes on in the next.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aserve.kernels.cake.attend_apart import attend_apart
from aserve.kernels.cake.attend_together import attend_together
from aserve.kernels.cake.decode_schedule import START_UNITS, find_first_unit, find_owner, find_pair, skip_empty
from aserve.kernels.cake.factors import to_factors
from aserve.kernels.cake.kv_blocks import find_channels, load_scale
from aserve.kernels.cake.softmax import LN_2, add_sinks


# Tables may begin at any element; specialised on that, the kernels would be compiled again while serving.
@triton.jit(
    do_not_specialize=[
        "lse",
        "page_table",
        "rows",
        "key_lens",
        "cu_query_lens",
        "starts",
        "first_seqs",
        "sinks",
        "table_stride",
        "num_seqs",
        "window",
    ]
)
def split_decode(
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
    starts,
    first_seqs,
    partial_outs,
    partial_lses,
    sinks,
    table_stride,
    num_seqs,
    window,
    scale,
    softcap,
    key_scale,
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
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
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    WARPS: tl.constexpr,
    IS_APART: tl.constexpr,
    FACTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    program = tl.program_id(0)
    total = tl.load(starts + num_seqs) * NUM_KV_HEADS
    unit = find_first_unit(program, total, tl.num_programs(0), MIN_UNITS)
    stop = find_first_unit(program + 1, total, tl.num_programs(0), MIN_UNITS)
    seq = tl.load(first_seqs + program)
    elements = find_channels(WIDTH, 1 if IS_APART else PER_WORD)
    while unit < stop:
        if QUERIES > 1:  # a sequence may have no query, or more than are served here
            seq = skip_empty(seq, starts)
        kv_head, place, num_units = find_pair(unit, seq, starts, NUM_KV_HEADS)
        taken = tl.minimum(num_units - place, stop - unit)
        block = tl.maximum(place - START_UNITS, 0)
        count = tl.maximum(place + taken - START_UNITS, 0) - block
        if count > 0:  # else its start is the last unit here
            key_len = tl.load(key_lens + seq)
            is_row, token, places, heads, num_queries = _find_rows(
                cu_query_lens, seq, kv_head, GROUP, QUERIES, TILE_ROWS
            )
            first = tl.maximum(key_len - (num_queries - 1) - window, 0) + block * BLOCK_LEN
            query_offsets = (places * Q_STRIDE + heads * HEAD_DIM)[:, None] + elements[None, :]
            is_inside = _mask_channels(is_row, elements, HEAD_DIM, WIDTH)
            queries = tl.load(q + token * Q_STRIDE + query_offsets, mask=is_inside, other=0.0)
            queries = to_factors(queries, FACTOR)
            table_row = page_table + tl.load(rows + seq).to(tl.int64) * table_stride

            head_scale = scale * load_scale(key_scale, kv_head, HAS_HEAD_SCALES, PER_WORD)
            if IS_APART:
                greatest, denominator, output = attend_apart(
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
                    head_scale,
                    softcap,
                    HEAD_DIM,
                    WIDTH,
                    PAGE_STRIDE,
                    TOKEN_STRIDE,
                    HEAD_STRIDE,
                    PAGE_SIZE,
                    HAS_SOFTCAP,
                    PER_WORD,
                    QUERIES,
                    BLOCK_LEN,
                    FACTOR,
                    WARPS,
                )
            else:
                greatest, denominator, output = attend_together(
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
                    head_scale,
                    softcap,
                    HEAD_DIM,
                    WIDTH,
                    PAGE_STRIDE,
                    TOKEN_STRIDE,
                    HEAD_STRIDE,
                    PAGE_SIZE,
                    HAS_SOFTCAP,
                    PER_WORD,
                    QUERIES,
                    BLOCK_LEN,
                    FACTOR,
                )

            if QUERIES > 1:  # a row that sees none of these keys weighs nothing, but may not be NaN
                denominator = tl.where(denominator > 0.0, denominator, 1.0)
            if count == num_units - START_UNITS:
                if HAS_SINKS:
                    greatest, denominator, kept = add_sinks(greatest, denominator, sinks, heads, is_row)
                    output *= kept[:, None]
                head_scale = load_scale(value_scale, kv_head, HAS_HEAD_SCALES, PER_WORD)
                output *= (head_scale / denominator)[:, None]
                first_row = token * (NUM_KV_HEADS * GROUP)
                out_rows = places * (NUM_KV_HEADS * GROUP) + heads
                outputs = out + first_row * HEAD_DIM + out_rows[:, None] * HEAD_DIM + elements[None, :]
                is_inside = _mask_channels(is_row, elements, HEAD_DIM, WIDTH)
                tl.store(outputs, output.to(out.dtype.element_ty), mask=is_inside)
                if WRITES_LSE:
                    tl.store(lse + first_row + out_rows, (greatest + tl.log2(denominator)) * LN_2, mask=is_row)
            else:
                partial_rows = (program * 2 + (block == 0).to(tl.int32)) * (QUERIES * GROUP) + tl.arange(0, TILE_ROWS)
                partial = partial_outs + partial_rows[:, None] * HEAD_DIM + elements[None, :]
                is_inside = _mask_channels(is_row, elements, HEAD_DIM, WIDTH)
                tl.store(partial, output / denominator[:, None], mask=is_inside)
                tl.store(partial_lses + partial_rows, greatest + tl.log2(denominator), mask=is_row)
        unit += taken
        if (place + taken == num_units) & (kv_head == NUM_KV_HEADS - 1):
            seq += 1


@triton.jit
def _mask_channels(is_row, channels, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return which channels of rows there are, [L, WIDTH], or [L, 1] for heads that fill their width."""
    if HEAD_DIM == WIDTH:
        return is_row[:, None]
    else:
        return is_row[:, None] & (channels < HEAD_DIM)[None, :]


@triton.jit
def _find_rows(cu_query_lens, seq, kv_head, GROUP: tl.constexpr, QUERIES: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Return which rows of a tile there are, the first query's token, query and head of each, and how many queries."""
    rows = tl.arange(0, TILE_ROWS)
    if QUERIES == 1:
        return rows < GROUP, seq.to(tl.int64), 0, kv_head * GROUP + rows, 1
    else:
        first = tl.load(cu_query_lens + seq)
        count = tl.load(cu_query_lens + seq + 1) - first
        places = rows // GROUP
        return places < count, first.to(tl.int64), places, kv_head * GROUP + rows % GROUP, count


@triton.jit(do_not_specialize=["lse", "cu_query_lens", "starts", "first_seqs", "sinks", "num_seqs", "num_programs"])
def merge_decode(
    out,
    lse,
    cu_query_lens,
    starts,
    first_seqs,
    partial_outs,
    partial_lses,
    sinks,
    num_seqs,
    num_programs,
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITES_LSE: tl.constexpr,
    HAS_HEAD_SCALES: tl.constexpr,
    PER_WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Finish the pairs that were cut, always in the same order.

    There is a program for each border of shares and row of a tile. The pair that the border cuts is its own if no
    border before cuts that pair too.
    """
    part, row = tl.program_id(0), tl.program_id(1)
    is_cut, kv_head, seq, first, last = _find_cut(
        part, starts, first_seqs, num_seqs, num_programs, NUM_KV_HEADS, QUERIES, MIN_UNITS
    )
    if OVERLAP:
        gdc_wait()
    if is_cut:
        token, is_query = seq, True
        if QUERIES > 1:
            token = tl.load(cu_query_lens + seq) + row // GROUP
            is_query = token < tl.load(cu_query_lens + seq + 1)
        if is_query:
            greatest, denominator, output = _merge_parts(
                partial_outs, partial_lses, first, last, row, QUERIES * GROUP, HEAD_DIM, WIDTH, SPLIT_BLOCK, QUERIES
            )
            heads = kv_head * GROUP + row % GROUP + tl.zeros([1], tl.int32)
            if HAS_SINKS:
                greatest, denominator, kept = add_sinks(greatest, denominator, sinks, heads, heads >= 0)
                output *= kept
            output *= load_scale(value_scale, kv_head, HAS_HEAD_SCALES, PER_WORD) / denominator
            rows = token.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
            elements = tl.arange(0, WIDTH)
            is_inside = elements < HEAD_DIM if HEAD_DIM < WIDTH else None
            tl.store(out + rows * HEAD_DIM + elements, output.to(out.dtype.element_ty), mask=is_inside)
            if WRITES_LSE:
                tl.store(lse + rows, (greatest + tl.log2(denominator)) * LN_2)


@triton.jit
def _find_cut(
    part,
    starts,
    first_seqs,
    num_seqs,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    MIN_UNITS: tl.constexpr,
):
    """Return whether the end of a share cuts a pair that no border before cuts, the pair, and who has its blocks."""
    next_part = tl.minimum(part + 1, num_programs - 1)
    seq = tl.load(first_seqs + next_part)
    total = tl.load(starts + num_seqs) * NUM_KV_HEADS
    unit = find_first_unit(part + 1, total, num_programs, MIN_UNITS)
    is_cut = unit < 0
    kv_head, first, last = 0, 0, 0
    if unit < total:
        if QUERIES > 1:
            seq = skip_empty(seq, starts)
        kv_head, place, num_units = find_pair(unit, seq, starts, NUM_KV_HEADS)
        first = find_owner(unit - place + START_UNITS, total, num_programs, MIN_UNITS)
        last = find_owner(unit - place + num_units - 1, total, num_programs, MIN_UNITS)
        is_cut = (place > START_UNITS) & (first == part)
    return is_cut, kv_head, seq, first, last


@triton.jit
def _merge_parts(
    partial_outs,
    partial_lses,
    first,
    last,
    row,
    NUM_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Return the greatest score and the denominator, [1] each, and the output of a row of all partial results.

    The output is [WIDTH], with zeros past HEAD_DIM.
    """
    elements = tl.arange(0, WIDTH)
    greatest = tl.full([1], float("-inf"), tl.float32)
    denominator = tl.zeros([1], tl.float32)
    output = tl.zeros([WIDTH], tl.float32)
    base = first
    while base <= last:
        programs = base + tl.arange(0, SPLIT_BLOCK)
        is_part = programs <= last
        offsets = (programs * 2 + (programs == first).to(tl.int32)) * NUM_ROWS + row
        lses = tl.load(partial_lses + offsets, mask=is_part, other=float("-inf"))
        is_inside = _mask_channels(is_part, elements, HEAD_DIM, WIDTH)
        outputs = tl.load(partial_outs + offsets[:, None] * HEAD_DIM + elements[None, :], mask=is_inside, other=0.0)
        new_greatest = tl.maximum(greatest, tl.max(lses, 0))
        offset = new_greatest
        if QUERIES > 1:
            offset = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        kept = tl.exp2(greatest - offset)
        weights = tl.exp2(lses - offset)
        denominator = denominator * kept + tl.sum(weights, 0)
        output = output * kept + tl.sum(outputs * weights[:, None], 0)
        greatest = new_greatest
        base += SPLIT_BLOCK
    return greatest, denominator, output
