"""The chunks of a step on the cake family: which launch computes them, and how they are cut into tiles."""

import logging
from dataclasses import dataclass

import torch

from aserve.attention.base import AttentionKind, AttentionProblem
from aserve.attention.cake_choice import choose_prefill, describe_choice
from aserve.kernels.cake.attention_call import AttentionCall, PagedBatch
from aserve.kernels.cake.paged_prefill import PLAIN_LAUNCH, PrefillLaunch, run_prefill
from aserve.kernels.cake.prefill_tiles import PrefillTiles, fill_tiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A step's chunks, and their tiles for each group of heads and each number of rows that layers cut them by."""

    batch: PagedBatch
    tiles: dict[tuple[int, int], PrefillTiles]

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return sum(tiles.num_bytes for tiles in self.tiles.values())


class CakeChunks:
    """Plans and runs prefill chunks for all kinds of a problem's layers."""

    def __init__(self, problem: AttentionProblem, device: torch.device) -> None:
        self._device = device
        self._launches = {kind: _choose_launch(problem, kind) for kind in problem.kinds}

    def plan(self, batch: PagedBatch, num_tokens: int) -> ChunkPlan:
        """Make room for the tiles of chunks that have ``num_tokens`` at most."""
        sizes = {_tile_size(kind, launch) for kind, launch in self._launches.items()}
        num_chunks = len(batch.rows)
        tiles = {size: PrefillTiles.allocate(num_tokens, num_chunks, *size, self._device) for size in sizes}
        return ChunkPlan(batch, tiles)

    def cut(self, plan: ChunkPlan) -> None:
        """Enqueue what tells each program its tile."""
        assert plan.batch.cu_query_lens is not None, "chunks have them"
        for (group, _), tiles in plan.tiles.items():
            fill_tiles(tiles, plan.batch.cu_query_lens, group=group)

    def attend(self, call: AttentionCall, plan: ChunkPlan, kind: AttentionKind) -> None:
        """Enqueue one layer's kernel."""
        launch = self._launches[kind]
        run_prefill(call, launch, plan.tiles[_tile_size(kind, launch)])


def _tile_size(kind: AttentionKind, launch: PrefillLaunch) -> tuple[int, int]:
    return kind.num_heads // kind.num_kv_heads, launch.tile_rows


def _choose_launch(problem: AttentionProblem, kind: AttentionKind) -> PrefillLaunch:
    choice = choose_prefill(problem, kind)
    if choice.variant is None:
        raise ValueError(f"cake: no variant serves {kind}: {choice.refusals}")
    logger.info("cake: %s", describe_choice(choice, f"chunks, head_dim {kind.head_dim}"))
    return choice.variant.launch or PLAIN_LAUNCH
