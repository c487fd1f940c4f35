"""Compilation for a Hopper GPU on a machine without one: a script that makes launches compilations, and its reports."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from aserve.kernels.cake.attention_call import KVPages
from aserve.kernels.nvfp4 import NVFP4, BlockScales

TESTS = Path(__file__).resolve().parent
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class HopperDriver:
    """What Triton asks of a driver before it compiles; for another GPU than Hopper with its ``capability``."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self._architecture = 10 * capability[0] + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def read_resources(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread and the bytes that did not fit in them."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    sizes = {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": sizes["reg"], "spilled_bytes": sizes["stack"] + sizes["local"]}


def compile_by(script: Path, cache: Path, *arguments: str) -> list[Any]:
    """Run ``script``, which must have a process where Triton does not interpret; return the JSON lines it prints."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def make_pages(num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> KVPages:
    """Three pages of 16 tokens for keys and values alike, with scales that are not 1."""
    bits = torch.empty(3, 16, num_kv_heads, head_dim, dtype=torch.uint8)
    if kv_dtype != NVFP4:
        pages = bits.to(kv_dtype)
        return KVPages(pages, pages, 0.5, 0.25)
    packed = bits[..., : head_dim // 2].contiguous()
    block_scales = bits[..., : head_dim // 16].contiguous().to(torch.float8_e4m3fn)
    return KVPages(packed, packed, 0.5, 0.25, BlockScales(block_scales, block_scales))
