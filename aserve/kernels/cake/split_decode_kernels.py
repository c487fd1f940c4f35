"""Paged decode with keys split over programs, and the merge of what they leave; specialised by its constants.

A program reads its share of blocks (decode_schedule.py), pair by pair. All heads of a group are rows of one tile, so
each key is read once. A pair that lies in one share is finished there; of one that is cut, each program leaves a
partial result. It has two places for these: the first for the end of a pair that began in another share (or its
middle), the second for the beginning of a pair that goes on in the next.
"""

import triton
import triton.language as tl

from aserve.kernels.cake.decode_schedule import find_first_unit, find_owner
from aserve.kernels.cake.kv_blocks import find_channels, find_offsets, load_block, load_scale
from aserve.kernels.cake.softmax import LN_2, add_sinks, scale_scores

MAX_FLOAT16 = tl.constexpr(65504.0)


# Tables may begin at any element; specialised on that, the kernels would be compiled again while serving.
@triton.jit(
    do_not_specialize=[
        "lse",
        "page_table",
        "rows",
        "key_lens",
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
    GROUP_TILE: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    FACTOR: tl.constexpr,
):
    program = tl.program_id(0)
    total = tl.load(starts + num_seqs) * NUM_KV_HEADS
    unit = find_first_unit(program, total, tl.num_programs(0), MIN_UNITS)
    stop = find_first_unit(program + 1, total, tl.num_programs(0), MIN_UNITS)
    seq = tl.load(first_seqs + program)
    members = tl.arange(0, GROUP_TILE)
    elements = find_channels(HEAD_DIM, PER_WORD)
    is_member = members < GROUP
    while unit < stop:
        seq_start = tl.load(starts + seq)
        num_blocks = tl.load(starts + seq + 1) - seq_start
        kv_head = (unit - seq_start * NUM_KV_HEADS) // num_blocks
        block = (unit - seq_start * NUM_KV_HEADS) % num_blocks
        count = tl.minimum(num_blocks - block, stop - unit)
        key_len = tl.load(key_lens + seq)
        first = tl.maximum(key_len - window, 0) + block * BLOCK_LEN
        heads = kv_head * GROUP + members
        places = heads[:, None] * HEAD_DIM + elements[None, :]
        queries = tl.load(q + seq.to(tl.int64) * Q_STRIDE + places, mask=is_member[:, None], other=0.0)
        if FACTOR == tl.float16:  # noqa: SIM300 - no constant; for queries in bfloat16, whose range is larger
            queries = tl.minimum(tl.maximum(queries.to(tl.float32), -MAX_FLOAT16), MAX_FLOAT16)
        queries = queries.to(FACTOR)
        table_row = page_table + tl.load(rows + seq).to(tl.int64) * table_stride

        head_scale = scale * load_scale(key_scale, kv_head, HAS_HEAD_SCALES, PER_WORD)
        greatest = tl.full([GROUP_TILE], float("-inf"), tl.float32)
        denominator = tl.zeros([GROUP_TILE], tl.float32)
        output = tl.zeros([GROUP_TILE, HEAD_DIM], tl.float32)
        for i in range(0, count):
            positions = first + i * BLOCK_LEN + tl.arange(0, BLOCK_LEN)
            is_key = positions < key_len
            offsets = find_offsets(
                table_row, positions, is_key, kv_head, PAGE_SIZE, PAGE_STRIDE, TOKEN_STRIDE, HEAD_STRIDE
            )
            block_keys = load_block(keys, key_blocks, offsets, is_key, HEAD_DIM, HEAD_DIM, PER_WORD, FACTOR)
            products = tl.dot(queries, tl.trans(block_keys), input_precision="ieee")
            scores = scale_scores(products, head_scale, softcap, HAS_SOFTCAP)
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            new_greatest = tl.maximum(greatest, tl.max(scores, 1))
            kept = tl.exp2(greatest - new_greatest)
            weights = tl.exp2(scores - new_greatest[:, None])
            denominator = denominator * kept + tl.sum(weights, 1)
            block_values = load_block(values, value_blocks, offsets, is_key, HEAD_DIM, HEAD_DIM, PER_WORD, FACTOR)
            output = tl.dot(weights.to(FACTOR), block_values, output * kept[:, None], input_precision="ieee")
            greatest = new_greatest

        if count == num_blocks:
            if HAS_SINKS:
                greatest, denominator, kept = add_sinks(greatest, denominator, sinks, heads, is_member)
                output *= kept[:, None]
            head_scale = load_scale(value_scale, kv_head, HAS_HEAD_SCALES, PER_WORD)
            output *= (head_scale / denominator)[:, None]
            token = seq.to(tl.int64) * (NUM_KV_HEADS * GROUP)
            tl.store(out + token * HEAD_DIM + places, output.to(out.dtype.element_ty), mask=is_member[:, None])
            if WRITES_LSE:
                tl.store(lse + token + heads, (greatest + tl.log2(denominator)) * LN_2, mask=is_member)
        else:
            place = (program * 2 + (block == 0).to(tl.int32)) * GROUP + members
            partial = partial_outs + place[:, None] * HEAD_DIM + elements[None, :]
            tl.store(partial, output / denominator[:, None], mask=is_member[:, None])
            tl.store(partial_lses + place, greatest + tl.log2(denominator), mask=is_member)
        unit += count
        if unit == (seq_start + num_blocks) * NUM_KV_HEADS:
            seq += 1


@triton.jit(do_not_specialize=["lse", "starts", "sinks", "num_seqs", "num_programs"])
def merge_decode(
    out,
    lse,
    starts,
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
    SPLIT_BLOCK: tl.constexpr,
    MIN_UNITS: tl.constexpr,
):
    """Finish the pairs that were cut, one program for each sequence and query head, always in the same order."""
    seq, head = tl.program_id(0), tl.program_id(1)
    kv_head, member = head // GROUP, head % GROUP
    total = tl.load(starts + num_seqs) * NUM_KV_HEADS
    seq_start = tl.load(starts + seq)
    num_blocks = tl.load(starts + seq + 1) - seq_start
    unit = seq_start * NUM_KV_HEADS + kv_head * num_blocks
    first = find_owner(unit, total, num_programs, MIN_UNITS)
    last = find_owner(unit + num_blocks - 1, total, num_programs, MIN_UNITS)
    if first < last:
        elements = tl.arange(0, HEAD_DIM)
        greatest = tl.full([1], float("-inf"), tl.float32)
        denominator = tl.zeros([1], tl.float32)
        output = tl.zeros([HEAD_DIM], tl.float32)
        base = first
        while base <= last:
            programs = base + tl.arange(0, SPLIT_BLOCK)
            is_part = programs <= last
            places = (programs * 2 + (programs == first).to(tl.int32)) * GROUP + member
            lses = tl.load(partial_lses + places, mask=is_part, other=float("-inf"))
            outputs = tl.load(
                partial_outs + places[:, None] * HEAD_DIM + elements[None, :], mask=is_part[:, None], other=0.0
            )
            new_greatest = tl.maximum(greatest, tl.max(lses, 0))
            kept = tl.exp2(greatest - new_greatest)
            weights = tl.exp2(lses - new_greatest)
            denominator = denominator * kept + tl.sum(weights, 0)
            output = output * kept + tl.sum(outputs * weights[:, None], 0)
            greatest = new_greatest
            base += SPLIT_BLOCK
        heads = head + tl.zeros([1], tl.int32)
        if HAS_SINKS:
            greatest, denominator, kept = add_sinks(greatest, denominator, sinks, heads, heads >= 0)
            output *= kept
        output *= load_scale(value_scale, kv_head, HAS_HEAD_SCALES, PER_WORD) / denominator
        token = seq.to(tl.int64) * (NUM_KV_HEADS * GROUP)
        tl.store(out + (token + head) * HEAD_DIM + elements, output.to(out.dtype.element_ty))
        if WRITES_LSE:
            tl.store(lse + token + heads, (greatest + tl.log2(denominator)) * LN_2)
