"""Compiles the cake family's decode kernels for a Hopper GPU on a machine without one; prints a JSON line a launch.

With a compute capability as its arguments (8 6, say), it compiles the rows that the selector admits there at both ends
of their groups, as the files of launches say for such GPUs.

Run as a script: Triton must not be interpreting. Launches become compilations, through Triton's own driver interface.
"""

import json
import re
import sys
from dataclasses import replace
from typing import Any

import torch
from doubles_hopper import HopperDriver, make_pages, read_resources
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import aserve.kernels.cake.split_decode as split_decode_module
from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.attention_call import AttentionCall, PagedBatch, ScoreRules
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, DecodeVariant
from aserve.kernels.cake.plain_decode import run_plain_decode
from aserve.kernels.cake.select_variant import VariantProblem, refuse_variant
from aserve.kernels.cake.split_decode import PartialResults, run_split_decode
from aserve.kernels.cake.tuned_launches import tune_rows
from aserve.kernels.nvfp4 import element_bytes

CPU = torch.device("cpu")
GROUP = 4
# Sequences, columns of the table, elements before the tables. The last two have more pairs than programs.
STEPS = ((16, 64, 0), (1, 1, 1), (5, 33, 3), (200, 40, 2), (300, 64, 1))


def report(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compile, do not launch."""
    kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
    line = {
        "kernel": self.fn.__name__,
        "copies": re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x([0-9a-f]+)", kernel.asm["ptx"]),
        "products": len(re.findall(r"(?:mma|wgmma)\S*\.sync", kernel.asm["ptx"])),
        "roundings": len(re.findall(r"cvt\S*\.bf16\.f16", kernel.asm["ptx"])),
        "byte_loads": len(re.findall(r"ld\.shared\.b8", kernel.asm["ptx"])),
        "conversions": len(re.findall(r"cvt\S*\.f16x2\.e4m3x2", kernel.asm["ptx"])),
        "rearrangements": len(re.findall(r"ldmatrix\S*\.trans", kernel.asm["ptx"])),
        "scalings": re.findall(r"mul\S*\.f16\S*", kernel.asm["ptx"]),
        "shared_bytes": kernel.metadata.shared,
        "is_new": all(kernel is not other for other in kernels),
        **read_resources(kernel.asm["cubin"]),
        **place,
    }
    kernels.append(kernel)
    print(json.dumps(line), flush=True)


def compile_variant(
    variant: DecodeVariant,
    num_seqs: int,
    width: int,
    *,
    first: int,
    is_full: bool,
    group: int = GROUP,
    head_dim: int | None = None,
) -> None:
    """As a captured or eager step of ``num_seqs`` sequences would; ``first`` moves the tables by some elements."""
    dtype, kv_dtype = variant.dtypes[-1]
    place.update(variant=variant.name, group=group)
    head_dim, num_kv_heads = head_dim or variant.head_dims[-1], 2
    q = torch.empty(num_seqs, num_kv_heads * group, head_dim, dtype=dtype)
    table = torch.zeros(num_seqs + 1, width, dtype=torch.int32)
    lens = torch.ones(num_seqs + first, dtype=torch.int32)[first:]
    sinks = torch.zeros(num_kv_heads * group) if is_full else None
    rules = ScoreRules(0.1, variant.max_keys or 300, 30.0, sinks) if is_full else ScoreRules(0.1)
    call = AttentionCall(
        q,
        torch.empty_like(q),
        torch.empty(q.shape[:2]) if is_full else None,
        make_pages(num_kv_heads, head_dim, kv_dtype),
        PagedBatch(table, lens, lens, 16),
        rules,
    )
    if variant.launch is None:
        run_plain_decode(call)
        return
    schedule = DecodeSchedule.allocate(num_seqs, 264, CPU)
    launch = variant.launch
    fill_schedule(schedule, call.batch, launch, window=rules.window, num_kv_heads=num_kv_heads)
    run_split_decode(call, launch, schedule, PartialResults.allocate(264, group, head_dim, CPU))


def compile_steps() -> None:
    """Of all rows, of those for several sizes of heads for the least too."""
    for row in DECODE_VARIANTS:
        for is_full in (False, True) if row.head_dims[-1] == 128 and row.max_keys is None else (True,):
            for num_seqs, width, first in STEPS:
                compile_variant(row, num_seqs, width, first=first, is_full=is_full)
        if len(row.head_dims) > 1 and row.launch is not None:
            for num_seqs, width, first in STEPS:
                compile_variant(row, num_seqs, width, first=first, is_full=True, head_dim=row.head_dims[0])


def compile_edges(capability: tuple[int, int]) -> None:
    """Of the rows that are chosen for GPUs of ``capability``, for the least and the largest group."""
    for row in tune_rows(DECODE_VARIANTS, "", capability):
        for group in (1, row.max_group):
            dtype, kv_dtype = row.dtypes[-1]
            problem = VariantProblem(dtype, kv_dtype, row.head_dims[-1], group, capability)
            problem = replace(problem, max_keys=row.max_keys or 8192, max_seqs=row.max_seqs or 320)
            if row.launch is not None and refuse_variant(row, problem) is None:
                kv_bytes = element_bytes(kv_dtype)
                place["bound"] = row.launch.shared_bytes(problem.head_dim, group, kv_bytes)
                programs = row.launch.count_programs(problem.head_dim, group, kv_bytes, SHARED_BYTES[capability])
                place.update(programs=programs, num_warps=row.launch.num_warps)
                compile_variant(row, 16, 64, first=0, is_full=True, group=group)


capability = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else (9, 0)
split_decode_module.can_overlap = lambda device: capability >= (9, 0)
compile_only, kernels, place = JITFunction.run, list[Any](), dict[str, Any]()
JITFunction.run = report
driver.set_active(HopperDriver(capability))
if len(sys.argv) == 1:
    compile_steps()
else:
    compile_edges(capability)
