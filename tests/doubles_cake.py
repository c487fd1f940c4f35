"""Calls of the cake family's kernels for the cases of the attention tests, and their check against dense attention."""

from typing import Any

import torch
from doubles_attention import PagedCase, check_attention, make_case

from aserve.attention.base import AttentionSpec
from aserve.kernels.cake.attention_call import AttentionCall, KVPages, PagedBatch, ScoreRules
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule
from aserve.kernels.cake.paged_prefill import run_prefill
from aserve.kernels.cake.prefill_launch import PrefillLaunch
from aserve.kernels.cake.prefill_tiles import PrefillTiles, fill_tiles
from aserve.kernels.cake.split_decode import PartialResults, run_split_decode
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.nvfp4 import NVFP4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {"fp8": torch.float8_e4m3fn, "nvfp4": NVFP4}
CHUNK_LAUNCH = PrefillLaunch(tile_rows=32, block_len=16, num_warps=4, num_stages=2)
NUM_PROGRAMS = 7  # that share the keys of a call
SINKS = torch.tensor([-1.0, 0.5, 3.0, 40.0], device=DEVICE)
RULES: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 16},
    {"sliding_window": 21},
    {"softcap": 0.5},
    {"sinks": SINKS},
    {"sliding_window": 37, "softcap": 2.0, "sinks": SINKS},
]


def chunks(spec: AttentionSpec, sizes: list[tuple[int, int]], **options: Any) -> PagedCase:
    """A case of chunks, each of so many queries and keys."""
    query_lens, key_lens = (list(lens) for lens in zip(*sizes, strict=True))
    return make_case(spec, query_lens, key_lens, 0, device=DEVICE, **options)


def make_call(case: PagedCase, spec: AttentionSpec, *, has_lse: bool = True) -> AttentionCall:
    """With NaN where results belong; a case of decodes alone says nothing of where queries start."""
    batch, pool = case.batch, case.layer_kv
    starts = None if batch.num_decodes == len(batch.key_lens) else batch.cu_query_lens
    rows = torch.arange(len(batch.key_lens), dtype=torch.int32, device=DEVICE)
    lse = torch.full(case.q.shape[:2], torch.nan, device=DEVICE) if has_lse else None
    return AttentionCall(
        q=case.q,
        out=torch.full_like(case.q, torch.nan),
        lse=lse,
        pages=KVPages(pool.key, pool.value, pool.key_scale, pool.value_scale, pool.block_scales),
        batch=PagedBatch(batch.page_table, rows, batch.key_lens_device, batch.page_size, starts),
        rules=ScoreRules(spec.scale, spec.sliding_window, spec.softcap, spec.sinks),
    )


def launch_for(call: AttentionCall) -> SplitLaunch:
    """One with blocks as small as they may be."""
    block_len = 16 if call.pages.block_scales is None else 32
    return SplitLaunch(block_len, num_warps=4, num_stages=2, programs_per_sm=1)


def run_split(
    call: AttentionCall,
    num_programs: int = NUM_PROGRAMS,
    max_queries: int = 1,
    launch: SplitLaunch | None = None,
) -> None:
    """Run the split decode and its merge, with NaN in what programs leave each other."""
    call.check()
    launch, batch = launch or launch_for(call), call.batch
    schedule = DecodeSchedule.allocate(len(batch.rows), num_programs, call.q.device, max_queries)
    partials = PartialResults.allocate(num_programs, max_queries * call.group, call.q.shape[2], call.q.device)
    partials.outs.fill_(torch.nan)
    partials.lses.fill_(torch.nan)
    fill_schedule(schedule, batch, launch, window=call.rules.window, num_kv_heads=call.num_kv_heads)
    run_split_decode(call, launch, schedule, partials)


def run_chunks(call: AttentionCall, launch: PrefillLaunch = CHUNK_LAUNCH) -> None:
    """Run the prefill kernel, with dirt where the tiles will be told."""
    call.check()
    starts = call.batch.cu_query_lens
    assert starts is not None
    tiles = PrefillTiles.allocate(len(call.q), len(starts) - 1, call.group, launch.tile_rows, call.q.device)
    tiles.chunks.fill_(77)
    tiles.first_rows.fill_(-77)
    fill_tiles(tiles, starts, group=call.group)
    run_prefill(call, launch, tiles)


def check(call: AttentionCall, case: PagedCase, spec: AttentionSpec) -> None:
    _, lse_error = check_attention(call.out, call.lse, case, spec)
    assert lse_error <= 1e-3
