"""The compatibility kernel: paged decode of any head size, group and dtype, one program for each sequence and head.

It splits nothing and multiplies no matrices, so it is slow for few long sequences; it always works.
"""

import triton
import triton.language as tl

from aserve.kernels.cake.attention_call import AttentionCall
from aserve.kernels.cake.kv_blocks import find_channels, find_keys, load_block, load_scale
from aserve.kernels.cake.softmax import LN_2, add_sinks, cap_scores, score_factor
from aserve.kernels.cake.variant import UNBOUNDED

BLOCK_LEN = 32


def run_plain_decode(call: AttentionCall) -> None:
    """Enqueue the kernel."""
    if call.batch.cu_query_lens is not None:
        raise ValueError("cu_query_lens: the plain kernel takes one query of each sequence")
    num_seqs, num_heads, head_dim = call.q.shape
    rules, pages, batch = call.rules, call.pages, call.batch
    _plain_decode[(num_seqs, num_heads)](
        call.q,
        call.out,
        call.out if call.lse is None else call.lse,
        *pages.pointers,
        batch.page_table,
        batch.rows,
        batch.key_lens,
        call.out if rules.sinks is None else rules.sinks,
        batch.page_table.stride(0),
        UNBOUNDED if rules.window is None else rules.window,
        rules.scale,
        rules.softcap or 1.0,
        pages.key_scale,
        pages.value_scale,
        **call.constants,
        WIDTH=triton.next_power_of_2(head_dim),
        BLOCK_LEN=BLOCK_LEN,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["lse", "page_table", "rows", "key_lens", "sinks", "table_stride", "window"])
def _plain_decode(
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
    WIDTH: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
):
    """Compute one head of one sequence: a row of ``out`` [N, H, D] and, if there is one, of ``lse`` [N, H], in base e.

    Sequence n has its query in row n of ``q``, Q_STRIDE elements apart, and its pages in row ``rows[n]`` of the page
    table, ``table_stride`` entries apart. The strides of pages, tokens and heads count elements, or words of 8 where
    PER_WORD is 8. ``window`` is in keys; ``key_scale`` and ``value_scale`` are numbers, or [K].
    """
    seq, head = tl.program_id(0), tl.program_id(1)
    elements = find_channels(WIDTH, PER_WORD)
    is_element = elements < HEAD_DIM
    query = tl.load(q + seq.to(tl.int64) * Q_STRIDE + head * HEAD_DIM + elements, mask=is_element, other=0.0)
    query = query.to(tl.float32)
    scale *= load_scale(key_scale, head // GROUP, HAS_HEAD_SCALES, PER_WORD)
    key_len = tl.load(key_lens + seq)
    table_row = page_table + tl.load(rows + seq).to(tl.int64) * table_stride
    greatest = tl.full([1], float("-inf"), tl.float32)
    denominator = tl.zeros([1], tl.float32)
    output = tl.zeros([WIDTH], tl.float32)
    base = tl.maximum(key_len - window, 0)
    while base < key_len:
        positions = base + tl.arange(0, BLOCK_LEN)
        is_key = positions < key_len
        pages, places = find_keys(table_row, positions, key_len, head // GROUP, PAGE_SIZE, TOKEN_STRIDE, HEAD_STRIDE)
        block_keys = load_block(
            keys, key_blocks, pages, places, None, HEAD_DIM, WIDTH, PAGE_STRIDE, PER_WORD, tl.float32
        )
        scores = cap_scores(tl.sum(block_keys * query[None, :], 1), scale, softcap, HAS_SOFTCAP)
        scores *= score_factor(scale, HAS_SOFTCAP)
        scores = tl.where(is_key, scores, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, 0))
        kept = tl.exp2(greatest - new_greatest)
        weights = tl.exp2(scores - new_greatest)
        denominator = denominator * kept + tl.sum(weights, 0)
        block_values = load_block(
            values, value_blocks, pages, places, None, HEAD_DIM, WIDTH, PAGE_STRIDE, PER_WORD, tl.float32
        )
        output = output * kept + tl.sum(block_values * weights[:, None], 0)
        greatest = new_greatest
        base += BLOCK_LEN
    place = seq.to(tl.int64) * tl.num_programs(1) + head + tl.zeros([1], tl.int64)
    if HAS_SINKS:
        greatest, denominator, kept = add_sinks(greatest, denominator, sinks, head + tl.zeros([1], tl.int32), head >= 0)
        output *= kept
    output *= load_scale(value_scale, head // GROUP, HAS_HEAD_SCALES, PER_WORD) / denominator
    tl.store(out + place * HEAD_DIM + elements, output.to(out.dtype.element_ty), mask=is_element)
    if WRITES_LSE:
        tl.store(lse + place, (greatest + tl.log2(denominator)) * LN_2)
