"""Paged decode with keys split over programs, specialised by its constants.

A program reads its share of blocks (decode_schedule.py), pair by pair. All heads of a group, for each of a sequence's
queries, are rows of one tile, so each key is read once. A pair that lies in one share is finished there; of one that is
cut, each program leaves a partial result. It has two places for these: the first for the end of a pair that began in
another share (or its middle), the second for the beginning of a pair that goes on in the next. ``merge_decode`` puts
them together, as in Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from aserve.kernels.cake.attend_apart import attend_apart
from aserve.kernels.cake.attend_together import attend_together
from aserve.kernels.cake.decode_schedule import START_UNITS, find_first_unit, find_pair, skip_empty
from aserve.kernels.cake.factors import to_factors
from aserve.kernels.cake.kv_blocks import find_channels, load_scale, mask_channels
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
    """Attend to one of P shares, which ``starts`` [N + 1] and ``first_seqs`` [P] tell, for all rows of its pairs.

    Finished rows go to ``out`` [T, H, D] and ``lse`` [T, H], in base e. Others go to ``partial_outs`` [P, 2, QUERIES *
    GROUP, D], divided by their own sums and not yet multiplied by the scale of values, and to ``partial_lses`` [P, 2,
    QUERIES * GROUP], in base 2 and without sinks. Sequence n has its pages in row ``rows[n]`` of the page table,
    ``table_stride`` entries apart, and its queries in ``q``, Q_STRIDE elements apart, at token n or, if QUERIES > 1,
    from cu_query_lens[n] on. The strides of pages, tokens and heads count elements, or words where PER_WORD is not 1: 4
    of e4m3, 8 of nvfp4. ``window`` is in keys; ``key_scale`` and ``value_scale`` are numbers, or [K].
    """
    if OVERLAP:
        gdc_launch_dependents()
    program = tl.program_id(0)
    total = tl.load(starts + num_seqs) * NUM_KV_HEADS
    unit = find_first_unit(program, total, tl.num_programs(0), MIN_UNITS)
    stop = find_first_unit(program + 1, total, tl.num_programs(0), MIN_UNITS)
    seq = tl.load(first_seqs + program)
    elements = find_channels(WIDTH, 1 if IS_APART else PER_WORD)
    attend: tl.constexpr = attend_apart if IS_APART else attend_together
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
            is_inside = mask_channels(is_row, elements, HEAD_DIM, WIDTH)
            queries = tl.load(q + token * Q_STRIDE + query_offsets, mask=is_inside, other=0.0)
            queries = to_factors(queries, FACTOR)
            table_row = page_table + tl.load(rows + seq).to(tl.int64) * table_stride

            head_scale = scale * load_scale(key_scale, kv_head, HAS_HEAD_SCALES, PER_WORD)
            greatest, denominator, output = attend(
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
                is_inside = mask_channels(is_row, elements, HEAD_DIM, WIDTH)
                tl.store(outputs, output.to(out.dtype.element_ty), mask=is_inside)
                if WRITES_LSE:
                    tl.store(lse + first_row + out_rows, (greatest + tl.log2(denominator)) * LN_2, mask=is_row)
            else:
                partial_rows = (program * 2 + (block == 0).to(tl.int32)) * (QUERIES * GROUP) + tl.arange(0, TILE_ROWS)
                partial = partial_outs + partial_rows[:, None] * HEAD_DIM + elements[None, :]
                is_inside = mask_channels(is_row, elements, HEAD_DIM, WIDTH)
                tl.store(partial, output / denominator[:, None], mask=is_inside)
                tl.store(partial_lses + partial_rows, greatest + tl.log2(denominator), mask=is_row)
        unit += taken
        if (place + taken == num_units) & (kv_head == NUM_KV_HEADS - 1):
            seq += 1


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
