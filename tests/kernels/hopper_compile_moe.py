"""Compiles the kernels of mixtures of experts for a Hopper GPU on a machine without one; prints a JSON line a kernel.

Run as a script with arguments like "gpt-oss:24", for as many tokens as give an expert 24 rows on average, and then for
one less; at the end for one token of Qwen3-30B-A3B. Triton must not be interpreting. Launches become compilations,
through Triton's own driver interface.
"""

import json
import re
import sys
from typing import Any

import torch
from doubles_experts import PlainExperts
from doubles_hopper import HopperDriver, read_resources
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aserve.kernels.experts import SILU, DenseExperts, Routing, SwiGlu
from aserve.kernels.gpu.compile_count import CompileCounter
from aserve.kernels.gpu.moe import run_moe


def report(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compile, and say what came of it."""
    before = counter.compilations()
    kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
    ptx = kernel.asm["ptx"]
    line = {
        "kernel": self.fn.__name__,
        "case": current,
        "num_threads": 32 * options["num_warps"],
        "compiled": counter.compilations() - before,
        "shared_bytes": kernel.metadata.shared,
        "products": len(re.findall(r"wgmma\.mma_async", ptx)),
        "other_products": len(re.findall(r"mma\.sync", ptx)),
        "copies": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        "gathers": re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x([0-9a-f]+)", ptx),
        "loads": re.findall(r"ld\.global\S*", ptx),
        "stores": re.findall(r"st\.global\S*", ptx),
        "num_waits_for_products": len(re.findall(r"wgmma\.wait_group", ptx)),
        "order": re.findall(r"griddepcontrol\.\w+|cp\.async\S*shared|ld\.global|st\.global", ptx),
        **read_resources(kernel.asm["cubin"]),
    }
    print(json.dumps(line), flush=True)


def experts_of(routing: Routing, hidden: int, inner: int, swiglu: SwiGlu = SILU) -> PlainExperts:
    """Return experts whose memory is never touched."""
    num_experts = routing.num_experts
    has_bias = swiglu != SILU
    return PlainExperts(
        routing,
        DenseExperts(
            bf16(num_experts, 2 * inner, hidden),
            bf16(num_experts, hidden, inner),
            bf16(num_experts, 2 * inner) if has_bias else None,
            bf16(num_experts, hidden) if has_bias else None,
        ),
        swiglu,
    )


def bf16(*shape: int) -> torch.Tensor:
    """Make activations or weights."""
    return torch.empty(*shape, dtype=torch.bfloat16)


def compile_for(experts: PlainExperts, mean_rows: float, more_tokens: int = 0) -> None:
    """Compile all kernels for as many tokens as give an expert ``mean_rows``."""
    routing = experts.routing
    num_tokens = int(mean_rows * routing.num_experts / routing.experts_per_token) + more_tokens
    hidden = experts.dense_weights.down.shape[1]
    run_moe(bf16(num_tokens, hidden), bf16(num_tokens, routing.num_experts), experts, overlap=True)


driver.set_active(HopperDriver())
compile_only, counter, current = JITFunction.run, CompileCounter(), ""
JITFunction.run = report
MODELS = {
    "Qwen3-30B-A3B": experts_of(Routing(128, 8, True), 2048, 768),
    "gpt-oss": experts_of(Routing(32, 4, True), 2880, 2880, SwiGlu(1.702, 7.0, 1.0)),
}
for argument in sys.argv[1:]:
    current, mean_rows = argument.split(":")
    compile_for(MODELS[current], float(mean_rows))
    compile_for(MODELS[current], float(mean_rows), more_tokens=-1)
compile_for(MODELS["Qwen3-30B-A3B"], 1 / 16)
