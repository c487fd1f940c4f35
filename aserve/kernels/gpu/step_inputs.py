"""From the tables on the device to a step's inputs, in one kernel."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from aserve.distributed.context_shard import ContextShard

BLOCK = 256
MAX_BLOCKS = 16  # programs that share the tokens of a sequence


@dataclass(frozen=True, slots=True)
class SequenceSpans:
    """Where each of S sequences, and then the padding, finds its tokens; int32 on the device.

    The last entry is the padding: the dummy row, all of it at position 0.
    """

    rows: Tensor  # [S + 1] of token pool and page table
    starts: Tensor  # [S + 1] first token among the step's
    lens: Tensor  # [S + 1] tokens
    key_lens: Tensor  # [S] tokens of the sequence, those of this step included


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """One entry a token, int64."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]


@dataclass(frozen=True, slots=True)
class PageSlots:
    """Where tokens lie in the pool: ``ContextShard.slots`` on the device."""

    page_table: Tensor  # [rows, pages] int32
    page_size: int  # of the scheduler
    shard: ContextShard
    dummy_page: int  # which takes the tokens of other ranks


def gather_inputs(spans: SequenceSpans, token_pool: Tensor, pages: PageSlots, inputs: TokenInputs) -> None:
    """Fill ``inputs`` for the tokens that ``spans`` name; token_pool [rows, positions] int32."""
    num_blocks = min(MAX_BLOCKS, triton.cdiv(inputs.token_ids.shape[0], BLOCK))
    _gather_inputs[(spans.rows.shape[0], num_blocks)](
        spans.rows,
        spans.starts,
        spans.lens,
        spans.key_lens,
        token_pool,
        pages.page_table,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        token_pool.stride(0),
        pages.page_table.stride(0),
        pages.page_size,
        pages.dummy_page,
        pages.shard.rank,
        pages.shard.size,
        BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["pool_stride", "table_stride", "page_size", "dummy_page", "rank"])
def _gather_inputs(
    rows,
    starts,
    lens,
    key_lens,
    token_pool,
    page_table,
    token_ids,
    positions,
    slot_mapping,
    pool_stride,
    table_stride,
    page_size,
    dummy_page,
    rank,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    num_tokens = tl.load(lens + seq)
    is_padding = seq == tl.num_programs(0) - 1
    row = tl.load(rows + seq).to(tl.int64)
    start = tl.load(starts + seq)
    first = tl.load(key_lens + seq, mask=not is_padding, other=0) - num_tokens
    base = tl.program_id(1) * BLOCK
    while base < num_tokens:
        offsets = base + tl.arange(0, BLOCK)
        is_token = offsets < num_tokens
        position = tl.where(is_padding, 0, first + offsets)
        token_id = tl.load(token_pool + row * pool_stride + position, mask=is_token)
        page = tl.load(page_table + row * table_stride + position // page_size, mask=is_token)
        own_size = page_size // NUM_RANKS
        slot = page.to(tl.int64) * own_size + position // NUM_RANKS % own_size
        if NUM_RANKS > 1:
            slot = tl.where(position % NUM_RANKS == rank, slot, dummy_page.to(tl.int64) * own_size)
        tl.store(token_ids + start + offsets, token_id.to(tl.int64), mask=is_token)
        tl.store(positions + start + offsets, position.to(tl.int64), mask=is_token)
        tl.store(slot_mapping + start + offsets, slot, mask=is_token)
        base += tl.num_programs(1) * BLOCK
