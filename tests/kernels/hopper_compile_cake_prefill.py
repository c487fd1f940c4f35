"""Compiles the cake family's prefill kernel for a Hopper GPU on a machine without one; prints a JSON line a launch.

Arguments are names of rows; one that ends with "+" is compiled with a window, sinks, a soft-cap and the log-sum-exp.
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

from aserve.kernels.cake.attention_call import AttentionCall, PagedBatch, ScoreRules
from aserve.kernels.cake.paged_prefill import run_prefill
from aserve.kernels.cake.prefill_launch import PLAIN_LAUNCH
from aserve.kernels.cake.prefill_tiles import PrefillTiles, fill_tiles
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS, PrefillVariant

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
        "is_new": all(kernel is not other for other in kernels),
        **read_resources(kernel.asm["cubin"]),
        **place,
    }
    kernels.append(kernel)
    print(json.dumps(line), flush=True)


def compile_row(row: PrefillVariant, num_tokens: int, num_chunks: int, *, first: int, is_full: bool) -> None:
    """As a step of so many tokens and chunks would; ``first`` moves the tables by some elements."""
    dtype, kv_dtype = row.dtypes[-1]
    head_dim = row.head_dims[-1]
    q = torch.empty(num_tokens, NUM_KV_HEADS * GROUP, head_dim, dtype=dtype)
    table = torch.zeros(num_chunks + 1, 7 + num_chunks, dtype=torch.int32)
    starts = torch.zeros(first + num_chunks + 1, dtype=torch.int32)[first:]
    lens = torch.ones(first + num_chunks, dtype=torch.int32)[first:]
    sinks = torch.zeros(NUM_KV_HEADS * GROUP) if is_full else None
    call = AttentionCall(
        q,
        torch.empty_like(q),
        torch.empty(q.shape[:2]) if is_full else None,
        make_pages(NUM_KV_HEADS, head_dim, kv_dtype),
        PagedBatch(table, lens, lens, 16, starts),
        ScoreRules(0.1, 300, 30.0, sinks) if is_full else ScoreRules(0.1),
    )
    launch = row.launch or PLAIN_LAUNCH
    tiles = PrefillTiles.allocate(num_tokens, num_chunks, GROUP, launch.tile_rows, CPU)
    fill_tiles(tiles, starts, group=GROUP)
    run_prefill(call, launch, tiles)


compile_only, kernels, place = JITFunction.run, list[Any](), dict[str, Any]()
JITFunction.run = report
driver.set_active(HopperDriver())
rows = {row.name: row for row in PREFILL_VARIANTS}
for asked in sys.argv[1:]:
    place["asked"] = asked
    for num_tokens, num_chunks, first in ((256, 16, 0), (1, 1, 1), (77, 5, 3)):
        compile_row(rows[asked.rstrip("+")], num_tokens, num_chunks, first=first, is_full=asked.endswith("+"))
