"""A step of prompts to time the launches of a row by, with the output of the smallest tiles to hold them against."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aserve.kernels.cake.attention_call import AttentionCall, PagedBatch, ScoreRules
from aserve.kernels.cake.case_pages import GROUP, NUM_KV_HEADS, PAGE_SIZE, SEED, check_output, draw_pages
from aserve.kernels.cake.paged_prefill import run_prefill
from aserve.kernels.cake.prefill_launch import PrefillLaunch, plain_launch
from aserve.kernels.cake.prefill_tiles import PrefillTiles, fill_tiles
from aserve.kernels.cake.prefill_variants import PrefillVariant
from aserve.kernels.gpu.replay_timer import time_calls

NUM_CALLS = 4  # in a graph; prompts are bound by arithmetic, so that cold pages make no difference


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """``num_chunks`` chunks of ``query_len`` tokens each, behind ``num_cached`` that are there already."""

    num_chunks: int
    query_len: int
    num_cached: int = 0


class PrefillCase:
    """One layer's chunks for the last dtypes and the last head size of a row."""

    def __init__(self, row: PrefillVariant, size: ChunkSize, device: torch.device) -> None:
        self._device = device
        dtype, kv_dtype = row.dtypes[-1]
        self._plain = plain_launch(dtype, kv_dtype)
        head_dim, num_chunks = row.head_dims[-1], size.num_chunks
        generator = torch.Generator(device).manual_seed(SEED)
        key_len = size.num_cached + size.query_len
        width = -(-key_len // PAGE_SIZE)
        shape = (num_chunks * width, PAGE_SIZE, NUM_KV_HEADS, head_dim)
        self._pages = draw_pages(shape, kv_dtype, generator)
        num_tokens = num_chunks * size.query_len
        self._q = torch.randn(num_tokens, NUM_KV_HEADS * GROUP, head_dim, generator=generator, device=device).to(dtype)
        places = torch.randperm(num_chunks * width, generator=generator, device=device).to(torch.int32)
        rows = torch.arange(num_chunks, dtype=torch.int32, device=device)
        starts = torch.arange(num_chunks + 1, dtype=torch.int32, device=device) * size.query_len
        table, lens = places.view(num_chunks, width), torch.full_like(rows, key_len)
        self._batch = PagedBatch(table, rows, lens, PAGE_SIZE, starts)

    def time(self, launch: PrefillLaunch, num_sms: int) -> float:
        """Return the microseconds of one layer; raise ArithmeticError for a wrong result."""
        check_output(self.run(launch), self.run(self._plain))
        return time_calls([self._prepare(launch)] * NUM_CALLS)

    def run(self, launch: PrefillLaunch) -> Tensor:
        """Run the step once and return its output."""
        return self._prepare(launch)()

    def _prepare(self, launch: PrefillLaunch) -> Callable[[], Tensor]:
        """Cut the chunks, which a step does once for all layers, and return what runs one layer."""
        tiles = PrefillTiles.allocate(len(self._q), len(self._batch.rows), GROUP, launch.tile_rows, self._device)
        starts = self._batch.cu_query_lens
        assert starts is not None, "as made above"
        fill_tiles(tiles, starts, group=GROUP)
        return partial(self._run, launch, tiles)

    def _run(self, launch: PrefillLaunch, tiles: PrefillTiles) -> Tensor:
        rules = ScoreRules(self._q.shape[2] ** -0.5)
        call = AttentionCall(self._q, torch.empty_like(self._q), None, self._pages, self._batch, rules)
        run_prefill(call, launch, tiles)
        return call.out
