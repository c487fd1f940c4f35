"""Compiles the kernels around lists of pages for a Hopper GPU on a machine without one; prints their names.

Run as a script: Triton must not be interpreting. Launches become compilations, through Triton's own driver interface.
"""

import json
from typing import Any

import torch
from doubles_attention import CapturedCase, make_case, make_spec
from doubles_hopper import HopperDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aserve.attention.base import CaptureShape, StepTables
from aserve.attention.page_lists import PageLists, fill_page_lists, scale_rows


def compile_and_tell(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
    if id(kernel) not in seen:
        seen.add(id(kernel))
        print(json.dumps(self.fn.__name__), flush=True)


def fill(tables: StepTables, **options: bool) -> None:
    lists = PageLists.allocate(len(tables.rows), 64, torch.device("cpu"))
    fill_page_lists(tables, lists, **options)  # type: ignore[arg-type]


driver.set_active(HopperDriver())
compile_only, seen = JITFunction.run, set[int]()
JITFunction.run = compile_and_tell
for num_decodes, num_chunks, width in ((1, 1, 1), (16, 16, 16), (5, 3, 33), (320, 128, 2560)):
    tables = CapturedCase.make(CaptureShape(512, num_decodes, num_chunks), width, 16).tables
    fill(tables.section(0, num_decodes), are_decodes=True)
    fill(tables.section(num_decodes, num_decodes + num_chunks), are_decodes=False)
    output = torch.zeros(num_decodes, 32, 128, dtype=torch.bfloat16)
    scale_rows(output, torch.zeros(num_chunks, dtype=torch.int32), 0.5)
for first in (0, 1, 2):
    batch = make_case(make_spec(1, 1, 64), [1, 1, 7, 9], [9, 40, 33, 90], 2).batch
    rows = torch.arange(4 - first, dtype=torch.int32)
    lens, starts = batch.key_lens_device[first:], batch.cu_query_lens[first:]
    eager = StepTables(batch.page_table[first:], rows, lens, starts, 16)
    fill(eager, are_decodes=first == 0, is_relative=first > 0)
