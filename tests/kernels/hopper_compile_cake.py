"""Compiles the cake family's decode kernels for a Hopper GPU on a machine without one; prints a JSON line a launch.

Run as a script: Triton must not be interpreting. Launches become compilations, through Triton's own driver interface.
"""

import json
import re
from typing import Any

import torch
from doubles_hopper import HopperDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aserve.kernels.cake.attention_call import AttentionCall, KVPages, PagedBatch, ScoreRules
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, DecodeVariant
from aserve.kernels.cake.plain_decode import run_plain_decode
from aserve.kernels.cake.split_decode import PartialResults, run_split_decode

CPU = torch.device("cpu")
GROUP = 4


def report(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compile, do not launch."""
    kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
    line = {
        "variant": current[0],
        "kernel": self.fn.__name__,
        "copies": re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x([0-9a-f]+)", kernel.asm["ptx"]),
        "products": len(re.findall(r"(?:mma|wgmma)\S*\.sync", kernel.asm["ptx"])),
        "roundings": len(re.findall(r"cvt\S*\.bf16\.f16", kernel.asm["ptx"])),
        "shared_bytes": kernel.metadata.shared,
        "is_new": all(kernel is not other for other in kernels),
    }
    kernels.append(kernel)
    print(json.dumps(line), flush=True)


def compile_variant(variant: DecodeVariant, num_seqs: int, width: int, *, first: int, is_full: bool) -> None:
    """As a captured or eager step of ``num_seqs`` sequences would; ``first`` moves the tables by some elements."""
    dtype, kv_dtype = variant.dtypes[-1]
    head_dim, num_kv_heads = variant.head_dims[-1], 2
    q = torch.empty(num_seqs, num_kv_heads * GROUP, head_dim, dtype=dtype)
    pages = torch.empty(3, 16, num_kv_heads, head_dim, dtype=torch.uint8).to(kv_dtype)
    table = torch.zeros(num_seqs + 1, width, dtype=torch.int32)
    lens = torch.ones(num_seqs + first, dtype=torch.int32)[first:]
    sinks = torch.zeros(num_kv_heads * GROUP) if is_full else None
    rules = ScoreRules(0.1, 5, 30.0, sinks) if is_full else ScoreRules(0.1)
    call = AttentionCall(
        q,
        torch.empty_like(q),
        torch.empty(q.shape[:2]) if is_full else None,
        KVPages(pages, pages, 0.5, 0.25),
        PagedBatch(table, lens, lens, 16),
        rules,
    )
    if variant.launch is None:
        run_plain_decode(call)
        return
    schedule = DecodeSchedule.allocate(num_seqs, 264, CPU)
    fill_schedule(schedule, lens, window=rules.window, num_kv_heads=num_kv_heads, block_len=variant.launch.block_len)
    run_split_decode(call, variant.launch, schedule, PartialResults.allocate(264, GROUP, head_dim, CPU))


driver.set_active(HopperDriver())
compile_only, kernels, current = JITFunction.run, list[Any](), [""]
JITFunction.run = report
for row in DECODE_VARIANTS:
    current[0] = row.name
    for is_full in (False, True) if 128 in row.head_dims else (True,):
        for num_seqs, width, first in ((16, 64, 0), (1, 1, 1), (5, 33, 3)):
            compile_variant(row, num_seqs, width, first=first, is_full=is_full)
