"""How the split decode kernel and its merge are launched, and the memory in between."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aserve.kernels.cake.attention_call import AttentionCall
from aserve.kernels.cake.decode_schedule import UNBOUNDED, DecodeSchedule
from aserve.kernels.cake.factors import factor_dtype
from aserve.kernels.cake.merge_decode_kernel import merge_decode
from aserve.kernels.cake.split_decode_kernel import split_decode
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.cake.variant import check_block_len, row_width
from aserve.kernels.gpu.launch import can_overlap, launch_options

MERGED_ELEMENTS = 8192  # of partial results, that the merge reads at once


@dataclass(frozen=True, slots=True)
class PartialResults:
    """Two places for each of P programs, float32; rewritten by each layer, so one for all of a stream."""

    outs: Tensor  # [P * 2 * group * D]
    lses: Tensor  # [P * 2 * group], base 2

    @classmethod
    def allocate(cls, num_programs: int, group: int, head_dim: int, device: torch.device) -> "PartialResults":
        """Return room for as many programs with tiles of ``group`` heads."""
        lses = torch.empty(num_programs * 2 * group, dtype=torch.float32, device=device)
        return cls(torch.empty(len(lses) * head_dim, dtype=torch.float32, device=device), lses)

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return 4 * (self.outs.numel() + self.lses.numel())


def run_split_decode(
    call: AttentionCall, launch: SplitLaunch, schedule: DecodeSchedule, partials: PartialResults
) -> None:
    """Enqueue both kernels; ``schedule`` is filled for the call's lengths, window and KV heads and for the launch."""
    head_dim = call.q.shape[2]
    width = row_width(head_dim)
    call = replace(call, pages=call.pages.in_words())
    rules, pages, batch = call.rules, call.pages, call.batch
    num_programs, group, max_queries = len(schedule.first_seqs), call.group, schedule.max_queries
    num_seqs, num_rows = len(batch.rows), max_queries * group
    if len(partials.lses) < num_programs * 2 * num_rows or len(partials.outs) < num_programs * 2 * num_rows * head_dim:
        raise ValueError(f"partials: too small for {num_programs} programs of {num_rows} rows of {head_dim}")
    if (batch.cu_query_lens is None) != (max_queries == 1):
        raise ValueError(f"cu_query_lens: must be given where a sequence has up to {max_queries} queries")
    kv_bytes = 4 / pages.per_word  # of an element that is packed
    check_block_len(launch.block_len, call.q.dtype, kv_bytes)
    is_apart = launch.is_apart(head_dim, num_rows, kv_bytes)
    # Only the merge starts early. Programs of the split that came while others still run would stand three on some
    # multiprocessors and one on others, though their shares are equal; and what they find written is also there for it.
    overlap = can_overlap(call.q.device)
    starts = batch.key_lens if batch.cu_query_lens is None else batch.cu_query_lens
    lse = partials.lses if call.lse is None else call.lse
    sinks = partials.lses if rules.sinks is None else rules.sinks
    split_decode[(num_programs,)](
        call.q,
        call.out,
        lse,
        *pages.pointers,
        batch.page_table,
        batch.rows,
        batch.key_lens,
        starts,
        schedule.starts,
        schedule.first_seqs,
        partials.outs,
        partials.lses,
        sinks,
        batch.page_table.stride(0),
        num_seqs,
        UNBOUNDED if rules.window is None else rules.window,
        rules.scale,
        rules.softcap or 1.0,
        pages.key_scale,
        pages.value_scale,
        NUM_KV_HEADS=call.num_kv_heads,
        **call.constants,
        WIDTH=width,
        QUERIES=max_queries,
        TILE_ROWS=launch.tile_rows(head_dim, num_rows, kv_bytes),
        BLOCK_LEN=launch.block_len,
        MIN_UNITS=launch.min_units,
        WARPS=launch.num_warps,
        IS_APART=is_apart,
        FACTOR=factor_dtype(call.q.dtype, pages.keys.dtype),
        OVERLAP=overlap,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.max_registers if is_apart else None,
    )
    if rules.window is not None and rules.window + max_queries - 1 <= launch.block_len:
        return  # a sequence is one block, which no border of programs cuts
    merge_decode[(num_programs, num_rows)](
        call.out,
        lse,
        starts,
        schedule.starts,
        schedule.first_seqs,
        partials.outs,
        partials.lses,
        sinks,
        num_seqs,
        num_programs,
        pages.value_scale,
        NUM_KV_HEADS=call.num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HAS_SINKS=rules.sinks is not None,
        WRITES_LSE=call.lse is not None,
        HAS_HEAD_SCALES=call.has_head_scales,
        PER_WORD=pages.per_word,
        WIDTH=width,
        QUERIES=max_queries,
        SPLIT_BLOCK=max(MERGED_ELEMENTS // width, 1),
        MIN_UNITS=launch.min_units,
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
