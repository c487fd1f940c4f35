"""Which queries of which chunk each program of the prefill kernel computes; told on the device, for a bounded grid.

A chunk's queries and the heads of a group that each of them has are rows in the order (query, head), cut into tiles of
a fixed number of rows. Tiles of a chunk stand last first: they see most keys, so the shortest work is left for the end.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_BLOCK = 128  # chunks whose tiles are counted at once
TILE_BLOCK = 256  # tiles that are written at once


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """As many tiles as there can be, int32 on the device; those left over belong to no chunk."""

    chunks: Tensor  # [N] -1 for none
    first_rows: Tensor  # [N]
    tile_rows: int

    @classmethod
    def allocate(
        cls, num_tokens: int, num_chunks: int, group: int, tile_rows: int, device: torch.device
    ) -> "PrefillTiles":
        """Return room for the tiles of any ``num_chunks`` chunks of ``num_tokens`` tokens together."""
        count = num_tokens * group // tile_rows + min(num_chunks, num_tokens)  # one more for each that is not full
        chunks, first_rows = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
        return cls(chunks, first_rows, tile_rows)


def fill_tiles(tiles: PrefillTiles, cu_query_lens: Tensor, *, group: int, min_query_len: int = 1) -> None:
    """Enqueue the cutting of C chunks: cu_query_lens [C + 1] int32, read on the device.

    Chunks of fewer than ``min_query_len`` tokens get no tile, as those without any.
    """
    num_chunks = len(cu_query_lens) - 1
    _fill_tiles[(num_chunks,)](
        cu_query_lens,
        tiles.chunks,
        tiles.first_rows,
        len(tiles.chunks),
        min_query_len,
        GROUP=group,
        TILE_ROWS=tiles.tile_rows,
        CHUNK_BLOCK=CHUNK_BLOCK,
        TILE_BLOCK=TILE_BLOCK,
    )


@triton.jit
def _count_tiles(cu_query_lens, chunks, num_chunks, min_query_len, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr):
    is_chunk = chunks < num_chunks
    starts = tl.load(cu_query_lens + chunks, mask=is_chunk, other=0)
    query_lens = tl.load(cu_query_lens + chunks + 1, mask=is_chunk, other=0) - starts
    return tl.where(query_lens >= min_query_len, (query_lens * GROUP + (TILE_ROWS - 1)) // TILE_ROWS, 0)


@triton.jit(do_not_specialize=["cu_query_lens", "tile_chunks", "tile_firsts", "num_tiles", "min_query_len"])
def _fill_tiles(
    cu_query_lens,
    tile_chunks,
    tile_firsts,
    num_tiles,
    min_query_len,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):
    """Write a chunk's tiles to tile_chunks and tile_firsts [num_tiles]; there is a program for each chunk.

    It finds its place by counting the tiles of all chunks before, CHUNK_BLOCK at a time; the last one also marks what
    is left over. cu_query_lens [C + 1] and ``min_query_len`` count tokens, tile_firsts rows: queries times GROUP.
    """
    chunk, num_chunks = tl.program_id(0), tl.num_programs(0)
    first, base = 0, 0
    while base < chunk:
        earlier = base + tl.arange(0, CHUNK_BLOCK)
        first += tl.sum(_count_tiles(cu_query_lens, earlier, chunk, min_query_len, GROUP, TILE_ROWS))
        base += CHUNK_BLOCK
    count = tl.sum(
        _count_tiles(cu_query_lens, chunk + tl.zeros([1], tl.int32), num_chunks, min_query_len, GROUP, TILE_ROWS)
    )
    is_last = chunk == num_chunks - 1
    end = tl.where(is_last, num_tiles, first + count)
    base = first
    while base < end:
        tiles = base + tl.arange(0, TILE_BLOCK)
        is_own = tiles < first + count
        tl.store(tile_chunks + tiles, tl.where(is_own, chunk, -1), mask=tiles < end)
        tl.store(tile_firsts + tiles, tl.where(is_own, (first + count - 1 - tiles) * TILE_ROWS, 0), mask=tiles < end)
        base += TILE_BLOCK
