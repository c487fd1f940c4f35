"""How the split decode kernel and its merge are launched, and the memory in between."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aserve.kernels.cake.attention_call import AttentionCall
from aserve.kernels.cake.decode_schedule import DecodeSchedule, is_cut
from aserve.kernels.cake.factors import factor_dtype
from aserve.kernels.cake.merge_decode_kernel import merge_decode
from aserve.kernels.cake.split_decode_kernel import split_decode
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.cake.variant import UNBOUNDED, check_block_len, row_width
from aserve.kernels.gpu.launch import can_overlap, launch_options

# How much of partial results the merge reads at once, by how many warps. Few pairs may be in many parts each. Of many
# pairs some are cut, into two or three parts; there it counts that all programs of the merge run at once.
FEW_PAIRS_ELEMENTS, FEW_PAIRS_WARPS = 8192, 4
MANY_PAIRS_ELEMENTS, MANY_PAIRS_WARPS = 1024, 1


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


def run_split_decode(
    call: AttentionCall, launch: SplitLaunch, schedule: DecodeSchedule, partials: PartialResults
) -> None:
    """Enqueue both kernels; ``schedule`` is filled for the call's lengths, window and KV heads and for the launch."""
    call = replace(call, pages=call.pages.in_words())
    _check(call, launch, schedule, partials)
    _launch_split(call, launch, schedule, partials)
    if is_cut(call.rules.window, schedule.max_queries, launch.block_len):
        _launch_merge(call, launch, schedule, partials)


def _check(call: AttentionCall, launch: SplitLaunch, schedule: DecodeSchedule, partials: PartialResults) -> None:
    num_programs, head_dim = len(schedule.first_seqs), call.q.shape[2]
    max_queries, num_rows = schedule.max_queries, schedule.max_queries * call.group
    if len(partials.lses) < num_programs * 2 * num_rows or len(partials.outs) < num_programs * 2 * num_rows * head_dim:
        raise ValueError(f"partials: too small for {num_programs} programs of {num_rows} rows of {head_dim}")
    if (call.batch.cu_query_lens is None) != (max_queries == 1):
        raise ValueError(f"cu_query_lens: must be given where a sequence has up to {max_queries} queries")
    check_block_len(launch.block_len, call.q.dtype, _element_bytes(call))


def _launch_split(call: AttentionCall, launch: SplitLaunch, schedule: DecodeSchedule, partials: PartialResults) -> None:
    head_dim, num_rows, kv_bytes = call.q.shape[2], schedule.max_queries * call.group, _element_bytes(call)
    rules, pages, batch = call.rules, call.pages, call.batch
    is_apart = launch.is_apart(head_dim, num_rows, kv_bytes)
    # Only the merge starts early. Programs of the split that came while others still run would stand three on some
    # multiprocessors and one on others, though their shares are equal; and what they find written is also there for it.
    split_decode[(len(schedule.first_seqs),)](
        call.q,
        call.out,
        _or(call.lse, partials.lses),
        *pages.pointers,
        batch.page_table,
        batch.rows,
        batch.key_lens,
        _or(batch.cu_query_lens, batch.key_lens),
        schedule.starts,
        schedule.first_seqs,
        partials.outs,
        partials.lses,
        _or(rules.sinks, partials.lses),
        batch.page_table.stride(0),
        len(batch.rows),
        UNBOUNDED if rules.window is None else rules.window,
        rules.scale,
        rules.softcap or 1.0,
        pages.key_scale,
        pages.value_scale,
        NUM_KV_HEADS=call.num_kv_heads,
        **call.constants,
        WIDTH=row_width(head_dim),
        QUERIES=schedule.max_queries,
        TILE_ROWS=launch.tile_rows(head_dim, num_rows, kv_bytes),
        BLOCK_LEN=launch.block_len,
        MIN_UNITS=launch.min_units,
        WARPS=launch.num_warps,
        IS_APART=is_apart,
        FACTOR=factor_dtype(call.q.dtype, pages.keys.dtype),
        OVERLAP=can_overlap(call.q.device),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.max_registers if is_apart else None,
    )


def _launch_merge(call: AttentionCall, launch: SplitLaunch, schedule: DecodeSchedule, partials: PartialResults) -> None:
    num_programs, width = len(schedule.first_seqs), row_width(call.q.shape[2])
    num_pairs, overlap = len(call.batch.rows) * call.num_kv_heads, can_overlap(call.q.device)
    # How many sequences have several queries differs from step to step, and none may have to compile first.
    are_few = num_pairs <= num_programs and schedule.max_queries == 1
    num_elements = FEW_PAIRS_ELEMENTS if are_few else MANY_PAIRS_ELEMENTS
    merge_decode[(num_pairs if are_few else num_programs, schedule.max_queries * call.group)](
        call.out,
        _or(call.lse, partials.lses),
        _or(call.batch.cu_query_lens, call.batch.key_lens),
        schedule.starts,
        schedule.first_seqs,
        partials.outs,
        partials.lses,
        _or(call.rules.sinks, partials.lses),
        len(call.batch.rows),
        num_programs,
        call.pages.value_scale,
        NUM_KV_HEADS=call.num_kv_heads,
        GROUP=call.group,
        HEAD_DIM=call.q.shape[2],
        HAS_SINKS=call.rules.sinks is not None,
        WRITES_LSE=call.lse is not None,
        HAS_HEAD_SCALES=call.has_head_scales,
        PER_WORD=call.pages.per_word,
        WIDTH=width,
        QUERIES=schedule.max_queries,
        SPLIT_BLOCK=max(num_elements // width, 1),
        MIN_UNITS=launch.min_units,
        BY_PAIR=are_few,
        OVERLAP=overlap,
        num_warps=FEW_PAIRS_WARPS if are_few else MANY_PAIRS_WARPS,
        **launch_options(overlap),
    )


def _element_bytes(call: AttentionCall) -> float:
    """Return the size of an element that is packed in words; elements of 16 bits and more count as words."""
    return 4 / call.pages.per_word


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return ``tensor``, or what a kernel gets in its place and leaves alone."""
    return stand_in if tensor is None else tensor
