"""The merge of what programs of the split decode kernel leave of pairs (sequence, KV head) that their borders cut.

Parts are read in the order of programs, so the same step gives the same bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aserve.kernels.cake.decode_schedule import START_UNITS, find_first_unit, find_owner, find_pair, skip_empty
from aserve.kernels.cake.kv_blocks import load_scale, mask_channels
from aserve.kernels.cake.softmax import LN_2, add_sinks


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
    BY_PAIR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """There is a program for each row of a tile and, if BY_PAIR, for each pair.

    Else there is one for each border of shares. The pair that the border cuts is its own if no border before cuts that
    pair too.
    """
    if OVERLAP:
        gdc_launch_dependents()
    place, row = tl.program_id(0), tl.program_id(1)
    if BY_PAIR:
        is_cut, kv_head, seq, first, last = _find_parts(place, starts, num_seqs, num_programs, NUM_KV_HEADS, MIN_UNITS)
    else:
        is_cut, kv_head, seq, first, last = _find_cut(
            place, starts, first_seqs, num_seqs, num_programs, NUM_KV_HEADS, QUERIES, MIN_UNITS
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
def _find_parts(pair, starts, num_seqs, num_programs, NUM_KV_HEADS: tl.constexpr, MIN_UNITS: tl.constexpr):
    """Return whether any border cuts a pair, the pair, and who has its blocks."""
    seq, kv_head = pair // NUM_KV_HEADS, pair % NUM_KV_HEADS
    total = tl.load(starts + num_seqs) * NUM_KV_HEADS
    start = tl.load(starts + seq)
    num_units = tl.load(starts + seq + 1) - start
    unit = start * NUM_KV_HEADS + kv_head * num_units
    first = find_owner(unit + START_UNITS, total, num_programs, MIN_UNITS)
    last = find_owner(unit + num_units - 1, total, num_programs, MIN_UNITS)
    return first < last, kv_head, seq, first, last


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
        is_inside = mask_channels(is_part, elements, HEAD_DIM, WIDTH)
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
