"""Compiles the Triton operators for a Hopper GPU on a machine without one; prints a JSON line a kernel.

Run as a script: Triton must not be interpreting. Launches become compilations, through Triton's own driver interface.
"""

import json
import re
from dataclasses import replace
from typing import Any

import torch
from doubles_hopper import HopperDriver
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aserve.kernels.gpu import gate_mul, norm, rope_store, transform_store
from aserve.kernels.gpu.compile_count import CompileCounter
from aserve.kernels.gpu.small_linear import NormBefore, SmallLinear, apply_small_linear
from aserve.kernels.key_transform import KeyTransform
from aserve.kernels.nvfp4 import BlockScales
from aserve.kernels.operators import HeadLayout, HeadNorms, KVTarget


def report(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compile, do not launch."""
    before = counter.compilations()
    kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
    ptx = kernel.asm["ptx"]
    line = {
        "kernel": self.fn.__name__,
        "overlap": bool(kernel.metadata.launch_pdl),
        "loads": re.findall(r"ld\.global\S*", ptx),
        "order": re.findall(r"griddepcontrol\.wait|ld\.global\S*|st\.global", ptx),
        "compiled": counter.compilations() - before,
    }
    print(json.dumps(line), flush=True)


def bf16(*shape: int) -> Tensor:
    """Make activations."""
    return torch.empty(*shape, dtype=torch.bfloat16)


def compile_all(overlap: bool, num_tokens: int) -> None:
    """Compile each kernel in the forms that Qwen3-8B needs."""
    x, gain = bf16(num_tokens, 4096), bf16(4096)
    norm.rms_norm(x, gain, 1e-6, overlap)
    norm.add_rms_norm(x, x.clone(), gain, 1e-6, overlap)
    gate_mul.silu_mul(bf16(num_tokens, 24576), overlap)
    norms = HeadNorms(bf16(128), bf16(128), 1e-6)
    blocks = torch.empty(4, 16, 8, 8, dtype=torch.float8_e4m3fn)
    matrices = torch.empty(2, 8, 128, 128)
    for page_dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        is_packed = page_dtype == torch.uint8
        pages = torch.empty(4, 16, 8, 64 if is_packed else 128, dtype=page_dtype)
        places = torch.zeros(num_tokens, dtype=torch.int64)
        block_scales = BlockScales(blocks, blocks.clone()) if is_packed else None
        target = KVTarget(pages, pages.clone(), places, 0.5, 0.25, block_scales)
        layout = HeadLayout(32, 8, 128)
        transforms = [None] if page_dtype == torch.bfloat16 else [None, KeyTransform(*matrices, torch.empty(8, 128))]
        for transform in transforms:
            qkv, to = bf16(num_tokens, 6144), replace(target, key_transform=transform)
            rope_store.rope_store(qkv, layout, norms, torch.empty(99, 128), places, to, overlap)
    fed = replace(target, key_transform=KeyTransform(*matrices, torch.empty(8, 128), torch.empty(8, 64, 64)))
    transform_store.transform_store(bf16(num_tokens, 32, 128), bf16(num_tokens, 8, 128), fed, overlap)
    layer, down, gate_up = SmallLinear(bf16(6144, 4096), bf16(6144)), SmallLinear(bf16(4096, 12288)), bf16(24576, 4096)
    apply_small_linear(x, layer, NormBefore(gain, 1e-6, x.clone()), bf16(num_tokens, 6144), overlap)
    apply_small_linear(bf16(num_tokens, 12288), down, None, bf16(num_tokens, 4096), overlap)
    gated = SmallLinear(gate_up, is_gated=True)
    apply_small_linear(x, gated, NormBefore(gain, 1e-6, x.clone()), bf16(num_tokens, 12288), overlap)
    apply_small_linear(x, layer, NormBefore(gain, 1e-6), torch.empty(num_tokens, 6144), overlap)


driver.set_active(HopperDriver())
compile_only, counter = JITFunction.run, CompileCounter()
JITFunction.run = report
for is_overlapping in (False, True):
    for count in (3, 4, 1):
        compile_all(is_overlapping, count)
