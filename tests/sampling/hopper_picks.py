"""Compiles the sampling kernels for a Hopper GPU on a machine without one; prints a JSON line a launch.

Run as a script: Triton must not be interpreting. Launches become compilations, through Triton's own driver interface.
"""

import json
from typing import Any

import torch
from doubles_hopper import HopperDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aserve.kernels.gpu.compile_count import CompileCounter
from aserve.sampling.draw import FilterValues
from aserve.sampling.gpu.token_picker import PoolTarget, TokenPicker

VOCAB = 151_936


def report(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compile, do not launch."""
    before = counter.compilations()
    kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
    line = {
        "kernel": self.fn.__name__,
        "grid": list(grid),
        "wide_loads": kernel.asm["ptx"].count("ld.global.v4"),
        "compiled": counter.compilations() - before,
    }
    print(json.dumps(line), flush=True)


def launch_all(picker: TokenPicker, num_rows: int, first: int) -> None:
    """Take rows and inputs from ``first`` on, so that their addresses have any alignment that their dtypes allow."""
    words = torch.zeros(8 * 600, dtype=torch.int32)
    logits = torch.empty(300, VOCAB)[first : first + num_rows]
    uniforms = words[600 * 2 :].view(torch.float64)[first : first + num_rows]
    temperatures, *filters = (words[600 * i + first :][:num_rows].view(torch.float32) for i in range(4))
    rows, positions, token_ids = (words[600 * (i + 4) + first :][:num_rows] for i in range(3))
    target = PoolTarget(torch.zeros(301, 4097 - first, dtype=torch.int32), rows, positions)
    picker.pick_plain(logits, uniforms, temperatures, token_ids, target)
    picker.pick_filtered(logits, uniforms, temperatures, FilterValues(*filters), token_ids, target)
    picker.pick_plain(logits, uniforms, temperatures, token_ids)


driver.set_active(HopperDriver())
compile_only, counter = JITFunction.run, CompileCounter()
JITFunction.run = report
for count, start in ((256, 0), (1, 0), (1, 3), (16, 1), (7, 2)):
    launch_all(TokenPicker(257, VOCAB, torch.device("cpu")), count, start)
