"""Compiles the medium linear layers for a Hopper GPU on a machine without one; prints a JSON line a kernel.

First two layers, each for two numbers of tokens, without and with overlap; then what the tuner would try.
Run as a script: Triton must not be interpreting.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from doubles_hopper import HopperDriver, read_resources
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aserve.kernels.gpu.compile_count import CompileCounter
from aserve.kernels.gpu.layer_case import LayerShape
from aserve.kernels.gpu.medium_linear import apply_medium_linear
from aserve.kernels.gpu.medium_linear_candidates import candidates
from aserve.kernels.gpu.medium_linear_launch import MediumLinearLaunch, MediumLinearShape
from aserve.kernels.gpu.small_linear import SmallLinear
from aserve.kernels.gpu.tune_medium_linear import Variant, compile_variant

ORDERED = r"griddepcontrol\.\w+|prefetch\.L2|cp\.async\.bulk\.tensor|ld\.global|st\.global"
CASES = [
    (LayerShape("o", 4096, 4096), (16, 256)),
    (LayerShape("down", 1024, 3072), (64, 192)),
    (LayerShape("gate_up", 12288, 4096, is_gated=True), (128, 320)),
    (LayerShape("head", 151936, 4096), (128,)),
]


def report(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compile, and say what came of it; each kernel once."""
    before = counter.compilations()
    kernel = compile_only(self, *args, grid=grid, warmup=warmup, **options)
    ptx = kernel.asm["ptx"]
    line = {
        "kernel": self.fn.__name__,
        "overlap": bool(kernel.metadata.launch_pdl),
        "num_threads": 32 * options["num_warps"],
        "ahead": options.get("AHEAD"),
        "compiled": counter.compilations() - before,
        "shared_bytes": kernel.metadata.shared,
        "products": len(re.findall(r"wgmma\.mma_async", ptx)),
        "other_products": len(re.findall(r"mma\.sync", ptx)),
        "loads": re.findall(r"ld\.global\S*", ptx),
        "stores": re.findall(r"st\.global\S*", ptx),
        "order": re.findall(ORDERED, ptx),
        "num_waits_for_products": len(re.findall(r"wgmma\.wait_group", ptx)),
        **read_resources(kernel.asm["cubin"]),
    }
    print(json.dumps(line), flush=True)


def variants() -> Iterator[Variant]:
    """Yield the tuner's first guess for each case, and a later one."""
    for layer, counts in CASES:
        for num_tokens in counts:
            launches = candidates(MediumLinearShape(layer.num_outputs, layer.width, num_tokens, layer.is_gated))
            for launch in (launches[0], launches[-3]):
                yield Variant(layer, launch, overlap=True)


def compile_twice(overlap: bool) -> None:
    """Compile a layer in two parts, and one that gates, for 100 tokens and then for 3."""
    for is_gated, num_parts in ((False, 2), (True, 1)):
        layer = SmallLinear(bf16(4096, 4096), bf16(4096), is_gated)
        for num_tokens in (100, 3):
            result = bf16(num_tokens, layer.num_outputs)
            launch = MediumLinearLaunch(64, 64, 2, num_parts=num_parts)
            apply_medium_linear(bf16(num_tokens, 4096), layer, result, overlap, launch, compile_only=True)


def bf16(*shape: int) -> Tensor:
    """Make activations or weights."""
    return torch.empty(*shape, dtype=torch.bfloat16)


driver.set_active(HopperDriver())
compile_only, counter = JITFunction.run, CompileCounter()
JITFunction.run = report
for is_overlapping in (False, True):
    compile_twice(is_overlapping)
for one in variants():
    compile_variant(one)
