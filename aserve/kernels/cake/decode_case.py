"""A step of decodes to time the launches of a row by, with the plain kernel's output to hold them against."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aserve.kernels.cake.attention_call import AttentionCall, KVPages, PagedBatch, ScoreRules
from aserve.kernels.cake.case_pages import (
    GROUP,
    NUM_KV_HEADS,
    PAGE_SIZE,
    SEED,
    check_output,
    copy_pages,
    draw_pages,
)
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule
from aserve.kernels.cake.decode_variants import DecodeVariant
from aserve.kernels.cake.plain_decode import run_plain_decode
from aserve.kernels.cake.split_decode import PartialResults, run_split_decode
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.gpu.replay_timer import num_cold_copies, time_calls
from aserve.kernels.nvfp4 import element_bytes


@dataclass(frozen=True, slots=True)
class StepSize:
    """``num_seqs`` sequences of ``key_len`` keys each, whose last tokens are ``num_queries`` queries."""

    num_seqs: int
    key_len: int
    num_queries: int = 1

    @property
    def num_tokens(self) -> int:
        """Queries in all."""
        return self.num_seqs * self.num_queries


class DecodeCase:
    """One layer's decodes for the last dtypes and the last head size of a row."""

    def __init__(self, row: DecodeVariant, size: StepSize, device: torch.device) -> None:
        self._device, self._size = device, size
        dtype, kv_dtype = row.dtypes[-1]
        head_dim, self._window = row.head_dims[-1], row.max_keys
        generator = torch.Generator(device).manual_seed(SEED)
        width = -(-size.key_len // PAGE_SIZE)
        num_pages = size.num_seqs * width
        shape = (num_pages, PAGE_SIZE, NUM_KV_HEADS, head_dim)
        pages = draw_pages(shape, kv_dtype, generator)
        self._q = torch.randn(size.num_tokens, NUM_KV_HEADS * GROUP, head_dim, generator=generator, device=device)
        self._q = self._q.to(dtype)
        places = torch.randperm(num_pages, generator=generator, device=device).to(torch.int32)
        rows = torch.arange(size.num_seqs, dtype=torch.int32, device=device)
        table, lens = places.view(size.num_seqs, width), torch.full_like(rows, size.key_len)
        starts = torch.arange(size.num_seqs + 1, dtype=torch.int32, device=device) * size.num_queries
        self._batch = PagedBatch(table, rows, lens, PAGE_SIZE, starts if size.num_queries > 1 else None)
        num_copies = num_cold_copies(2 * int(num_pages * PAGE_SIZE * NUM_KV_HEADS * head_dim * element_bytes(kv_dtype)))
        self._pages = [pages] + [copy_pages(pages) for _ in range(num_copies - 1)]

    def time(self, launch: SplitLaunch, num_sms: int) -> float:
        """Return the microseconds of one layer; raise ArithmeticError for a wrong result."""
        num_programs = num_sms * launch.programs_per_sm
        check_output(self.run(launch, num_programs), self._run_plainly())
        run = self._prepare(launch, num_programs)
        return time_calls([partial(run, pages) for pages in self._pages])

    def run(self, launch: SplitLaunch, num_programs: int) -> Tensor:
        """Run the step once and return its output."""
        return self._prepare(launch, num_programs)(self._pages[0])

    def _prepare(self, launch: SplitLaunch, num_programs: int) -> Callable[[KVPages], Tensor]:
        """Deal the keys out, which a step does once for all layers, and return what runs one layer."""
        num_queries, head_dim = self._size.num_queries, self._q.shape[2]
        schedule = DecodeSchedule.allocate(self._size.num_seqs, num_programs, self._device, num_queries)
        fill_schedule(schedule, self._batch, launch, window=self._window, num_kv_heads=NUM_KV_HEADS)
        partials = PartialResults.allocate(num_programs, num_queries * GROUP, head_dim, self._device)

        def run(pages: KVPages) -> Tensor:
            call = self._call(pages, self._batch)
            run_split_decode(call, launch, schedule, partials)
            return call.out

        return run

    def _run_plainly(self) -> Tensor:
        """Return the output with a sequence of its own for each query, which ends where that one stands."""
        num_queries = self._size.num_queries
        rows = self._batch.rows.repeat_interleave(num_queries)
        place = torch.arange(self._size.num_tokens, dtype=torch.int32, device=self._device) % num_queries
        lens = self._size.key_len - (num_queries - 1) + place
        call = self._call(self._pages[0], PagedBatch(self._batch.page_table, rows, lens, PAGE_SIZE))
        run_plain_decode(call)
        return call.out

    def _call(self, pages: KVPages, batch: PagedBatch) -> AttentionCall:
        rules = ScoreRules(self._q.shape[2] ** -0.5, self._window)
        return AttentionCall(self._q, torch.empty_like(self._q), None, pages, batch, rules)
