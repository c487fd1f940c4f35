"""Compiles the cake family's kernels for chunks for a Hopper GPU on a machine without one; prints a JSON line a launch.

Arguments are names of rows; one that ends with "+" is compiled with a window, sinks, a soft-cap and the log-sum-exp.
After a compute capability ("10.0", say) they are compiled for one step on such a GPU, if they are admitted there, with
the launches that files have for it; those of few queries with the least tile, too.
Run as a script: Triton must not be interpreting. Launches become compilations, through Triton's own driver interface.
"""

import json
import re
import sys
from typing import Any

import torch
from doubles_hopper import HopperDriver, make_pages, read_resources
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import aserve.kernels.cake.split_decode as split_decode_module
from aserve.kernels.cake.attention_call import AttentionCall, PagedBatch, ScoreRules
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule
from aserve.kernels.cake.decode_variants import MAX_QUERIES, SEVERAL_VARIANTS, DecodeVariant
from aserve.kernels.cake.paged_prefill import run_prefill
from aserve.kernels.cake.prefill_launch import plain_launch
from aserve.kernels.cake.prefill_tiles import PrefillTiles, fill_tiles
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS, PrefillVariant
from aserve.kernels.cake.select_variant import VariantProblem, refuse_variant
from aserve.kernels.cake.split_decode import PartialResults, run_split_decode
from aserve.kernels.cake.tuned_launches import tune_rows
from aserve.kernels.cake.variant import Variant
from aserve.kernels.nvfp4 import element_bytes

CPU = torch.device("cpu")
GROUP, NUM_KV_HEADS = 4, 2


def report(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compile, do not launch."""
    kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
    ptx = kernel.asm["ptx"]
    line = {
        "kernel": self.fn.__name__,
        "copies": re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x([0-9a-f]+)", ptx),
        "under_way": [int(count) for count in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)],  # at each wait
        "group_products": len(re.findall(r"wgmma\.mma_async", ptx)),
        "warp_products": len(re.findall(r"\bmma\.sync", ptx)),
        "roundings": len(re.findall(r"cvt\S*\.bf16\.f16", ptx)),
        "shared_bytes": kernel.metadata.shared,
        "early_starts": len(re.findall(r"griddepcontrol", ptx)),
        "is_new": all(kernel is not other for other in kernels),
        **read_resources(kernel.asm["cubin"]),
        **place,
    }
    kernels.append(kernel)
    print(json.dumps(line), flush=True)


def make_call(
    row: Variant, num_tokens: int, num_chunks: int, *, group: int, first: int, is_full: bool
) -> AttentionCall:
    """As in a step of so many tokens and chunks; ``first`` moves the tables by some elements."""
    dtype, kv_dtype = row.dtypes[-1]
    head_dim = row.head_dims[-1]
    q = torch.empty(num_tokens, NUM_KV_HEADS * group, head_dim, dtype=dtype)
    table = torch.zeros(num_chunks + 1, 7 + num_chunks, dtype=torch.int32)
    starts = torch.zeros(first + num_chunks + 1, dtype=torch.int32)[first:]
    lens = torch.ones(first + num_chunks, dtype=torch.int32)[first:]
    sinks = torch.zeros(NUM_KV_HEADS * group) if is_full else None
    return AttentionCall(
        q,
        torch.empty_like(q),
        torch.empty(q.shape[:2]) if is_full else None,
        make_pages(NUM_KV_HEADS, head_dim, kv_dtype),
        PagedBatch(table, lens, lens, 16, starts),
        ScoreRules(0.1, 300, 30.0, sinks) if is_full else ScoreRules(0.1),
    )


def compile_prefill(row: PrefillVariant, num_tokens: int, num_chunks: int, *, first: int, is_full: bool) -> None:
    """What such a step launches for its chunks."""
    call = make_call(row, num_tokens, num_chunks, group=GROUP, first=first, is_full=is_full)
    starts = call.batch.cu_query_lens
    assert starts is not None
    launch = row.launch or plain_launch(*row.dtypes[-1])
    tiles = PrefillTiles.allocate(num_tokens, num_chunks, GROUP, launch.tile_rows, CPU)
    fill_tiles(tiles, starts, group=GROUP)
    run_prefill(call, launch, tiles)


def compile_several(
    row: DecodeVariant,
    num_tokens: int,
    num_chunks: int,
    *,
    first: int,
    is_full: bool,
    group: int = GROUP,
    num_queries: int | None = None,
) -> None:
    """The same with as many queries as the row's tile has room for."""
    launch = row.launch
    num_queries = num_queries or row.max_group // group
    assert launch is not None
    call = make_call(row, num_tokens, num_chunks, group=group, first=first, is_full=is_full)
    head_dim, num_rows = call.q.shape[2], group * num_queries
    schedule = DecodeSchedule.allocate(num_chunks, 264, CPU, num_queries)
    fill_schedule(schedule, call.batch, launch, window=call.rules.window, num_kv_heads=NUM_KV_HEADS)
    run_split_decode(call, launch, schedule, PartialResults.allocate(264, num_rows, head_dim, CPU))


def compile_steps(asked: str) -> None:
    """A row's kernels for three steps."""
    name, is_full = asked.rstrip("+"), asked.endswith("+")
    for num_tokens, num_chunks, first in ((256, 16, 0), (1, 1, 1), (77, 5, 3)):
        if name in several_rows:
            compile_several(several_rows[name], num_tokens, num_chunks, first=first, is_full=is_full)
        else:
            compile_prefill(prefill_rows[name], num_tokens, num_chunks, first=first, is_full=is_full)


def compile_edges(asked: str) -> None:
    """A row's kernels for one step on another GPU; of a row of few queries with its least and its largest tile."""
    name, is_full = asked.rstrip("+"), asked.endswith("+")
    if name in prefill_rows:
        if is_admitted(prefill_rows[name], GROUP, 1):
            compile_prefill(prefill_rows[name], 256, 16, first=0, is_full=is_full)
        return
    row = several_rows[name]
    for group, num_queries in ((1, 2), (row.max_group // MAX_QUERIES, MAX_QUERIES)):
        if is_admitted(row, group, num_queries):
            compile_several(row, 256, 16, first=0, is_full=is_full, group=group, num_queries=num_queries)


def is_admitted(row: Variant, group: int, num_queries: int) -> bool:
    """Whether the selector takes the row on the GPU that is asked for; what its launch may take then is reported."""
    (dtype, kv_dtype), head_dim = row.dtypes[-1], row.head_dims[-1]
    if row.launch is not None:
        place["bound"] = row.launch.shared_bytes(head_dim, group * num_queries, element_bytes(kv_dtype))
    problem = VariantProblem(dtype, kv_dtype, head_dim, group, capability, num_queries=num_queries)
    return row.launch is not None and refuse_variant(row, problem) is None


compile_only, kernels, place = JITFunction.run, list[Any](), dict[str, Any]()
JITFunction.run = report
version, names = (sys.argv[1], sys.argv[2:]) if "." in sys.argv[1] else ("9.0", sys.argv[1:])
capability = (int(version.split(".")[0]), int(version.split(".")[1]))
split_decode_module.can_overlap = lambda device: capability >= (9, 0)
driver.set_active(HopperDriver(capability))
prefill_rows = {row.name: row for row in tune_rows(PREFILL_VARIANTS, "", capability)}
several_rows = {row.name: row for row in tune_rows(SEVERAL_VARIANTS, "", capability)}
for asked in names:
    place["asked"] = asked
    if capability == (9, 0):
        compile_steps(asked)
    else:
        compile_edges(asked)
