"""Which keys of which sequence each program of the decode kernel reads: equal shares, whatever the lengths.

The keys that a sequence's queries see are cut into blocks. The units of work of a pair (sequence, KV head) are what its
start costs and its blocks, in this order; pairs stand in the order (sequence, KV head). Each program takes a run of
units, as long as anyone else's or one longer, so the grid is bounded and nothing is planned on the host. A pair may be
cut by the border of programs. Without the units for starts, programs that got many short sequences would be the last.

Equal runs of blocks, whatever these belong to, are from Stream-K for matrix products (Osama et al., 2023);
LeanAttention has them for decodes (Sanovar et al., 2024).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.kernels.cake.attention_call import PagedBatch
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.cake.variant import UNBOUNDED

SEQ_BLOCK = 256  # sequences whose blocks are summed at once
PROGRAM_BLOCK = 16  # programs whose first sequence is looked for at once
START_UNITS = tl.constexpr(2)  # what the start of a pair costs, in blocks: its queries, an empty pipeline, its output


@dataclass(frozen=True, slots=True)
class DecodeSchedule:
    """The shares of P programs in the work of N sequences, int32 on the device."""

    starts: Tensor  # [N + 1] units of all sequences before, for one KV head
    first_seqs: Tensor  # [P] the sequence in which each program begins
    max_queries: int = 1  # of a sequence

    @classmethod
    def allocate(cls, num_seqs: int, num_programs: int, device: torch.device, max_queries: int = 1) -> "DecodeSchedule":
        """Return room for the shares; ``fill_schedule`` writes them."""
        starts = torch.empty(num_seqs + 1, dtype=torch.int32, device=device)
        return cls(starts, torch.empty(num_programs, dtype=torch.int32, device=device), max_queries)


def fill_schedule(
    schedule: DecodeSchedule, batch: PagedBatch, launch: SplitLaunch, *, window: int | None, num_kv_heads: int
) -> None:
    """Enqueue the sharing of the work on ``batch`` among programs, which read its lengths on the device.

    ``window`` keys are seen by a query, itself included, all if it is None. ``launch`` says how many keys a block has,
    and how many units are worth a program of their own. Where sequences may have several queries, those with more than
    the schedule is for, or none, have no share.
    """
    key_lens, cu_query_lens = batch.key_lens, batch.cu_query_lens
    num_programs = len(schedule.first_seqs)
    if (cu_query_lens is None) != (schedule.max_queries == 1):
        raise ValueError(f"cu_query_lens: must be given where a sequence has up to {schedule.max_queries} queries")
    _fill_schedule[(triton.cdiv(num_programs, PROGRAM_BLOCK),)](
        key_lens,
        key_lens if cu_query_lens is None else cu_query_lens,
        schedule.starts,
        schedule.first_seqs,
        len(schedule.starts) - 1,
        num_programs,
        UNBOUNDED if window is None else window,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_LEN=launch.block_len,
        QUERIES=schedule.max_queries,
        MIN_UNITS=launch.min_units,
        SEQ_BLOCK=SEQ_BLOCK,
        PROGRAM_BLOCK=PROGRAM_BLOCK,
    )


def is_cut(window: int | None, max_queries: int, block_len: int) -> bool:
    """Whether borders of programs may cut pairs: what all of a sequence's queries see may take more than one block."""
    return window is None or window + max_queries - 1 > block_len


@triton.jit
def find_first_unit(program, total, num_programs, MIN_UNITS: tl.constexpr):
    """Return where the share of ``program`` begins, and ends that of the one before; ``total`` past the last share."""
    num_active = tl.maximum(tl.minimum(num_programs, total // MIN_UNITS), 1)
    place = tl.minimum(program, num_active)
    return place * (total // num_active) + tl.minimum(place, total % num_active)


@triton.jit
def find_owner(unit, total, num_programs, MIN_UNITS: tl.constexpr):
    """Return the program in whose share ``unit`` is; the inverse of ``find_first_unit``."""
    num_active = tl.maximum(tl.minimum(num_programs, total // MIN_UNITS), 1)
    share, num_longer = total // num_active, total % num_active
    border = num_longer * (share + 1)
    return tl.where(
        unit < border, unit // (share + 1), num_longer + tl.maximum(unit - border, 0) // tl.maximum(share, 1)
    )


@triton.jit
def _count_units(key_lens, cu_query_lens, seqs, num_seqs, window, BLOCK_LEN: tl.constexpr, QUERIES: tl.constexpr):
    is_seq = seqs < num_seqs
    lens = tl.load(key_lens + seqs, mask=is_seq, other=0)
    if QUERIES > 1:
        first = tl.load(cu_query_lens + seqs, mask=is_seq, other=0)
        num_queries = tl.load(cu_query_lens + seqs + 1, mask=is_seq, other=0) - first
        is_seq &= (num_queries > 0) & (num_queries <= QUERIES)
        num_more = num_queries - 1  # keys that other queries than the first see
        lens = tl.minimum(lens - num_more, window) + num_more
    else:
        lens = tl.minimum(lens, window)
    # No sequence is without a block, so that no length can make the readers divide by zero.
    num_blocks = tl.maximum((lens + (BLOCK_LEN - 1)) // BLOCK_LEN, 1)
    return tl.where(is_seq, START_UNITS + num_blocks, 0)


@triton.jit
def find_pair(unit, seq, starts, num_kv_heads):
    """Return the KV head of the pair of ``seq`` that has ``unit``, the place among the pair's units, their number."""
    seq_start = tl.load(starts + seq)
    num_units = tl.load(starts + seq + 1) - seq_start
    unit -= seq_start * num_kv_heads
    return unit // num_units, unit % num_units, num_units


@triton.jit
def skip_empty(seq, starts):
    """Return ``seq`` or the next sequence that has units; the last one with units may not be passed."""
    while tl.load(starts + seq + 1) == tl.load(starts + seq):
        seq += 1
    return seq


@triton.jit(
    do_not_specialize=["key_lens", "cu_query_lens", "starts", "first_seqs", "num_seqs", "num_programs", "window"]
)
def _fill_schedule(
    key_lens,
    cu_query_lens,
    starts,
    first_seqs,
    num_seqs,
    num_programs,
    window,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    QUERIES: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    SEQ_BLOCK: tl.constexpr,
    PROGRAM_BLOCK: tl.constexpr,
):
    """Write ``starts`` [N + 1] and ``first_seqs`` [P] from key_lens [N] and, if QUERIES > 1, cu_query_lens [N + 1].

    A program does so for PROGRAM_BLOCK of the P programs of the decode kernel, the first one for ``starts``, too;
    each counts the blocks of all sequences, SEQ_BLOCK at a time. ``window`` is in keys.
    """
    part = tl.program_id(0)
    total, base = 0, 0
    while base < num_seqs:
        seqs = base + tl.arange(0, SEQ_BLOCK)
        total += tl.sum(_count_units(key_lens, cu_query_lens, seqs, num_seqs, window, BLOCK_LEN, QUERIES))
        base += SEQ_BLOCK
    programs = part * PROGRAM_BLOCK + tl.arange(0, PROGRAM_BLOCK)
    units = find_first_unit(programs, total * NUM_KV_HEADS, num_programs, MIN_UNITS)
    num_before = tl.zeros([PROGRAM_BLOCK], tl.int32)  # sequences that end before each program begins
    before, base = 0, 0
    while base < num_seqs:
        seqs = base + tl.arange(0, SEQ_BLOCK)
        counts = _count_units(key_lens, cu_query_lens, seqs, num_seqs, window, BLOCK_LEN, QUERIES)
        ends = before + tl.cumsum(counts, 0)
        if part == 0:
            tl.store(starts + seqs + 1, ends, mask=seqs < num_seqs)
        has_ended = (ends[None, :] * NUM_KV_HEADS <= units[:, None]) & (seqs[None, :] < num_seqs)
        num_before += tl.sum(has_ended.to(tl.int32), 1)
        before += tl.sum(counts)
        base += SEQ_BLOCK
    if part == 0:
        tl.store(starts, 0)
    tl.store(first_seqs + programs, num_before, mask=programs < num_programs)
