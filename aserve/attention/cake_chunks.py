"""The chunks of a step on the cake family: which launch computes them, and how they are cut into tiles."""

import logging
from dataclasses import dataclass

import torch

from aserve.attention.base import AttentionKind, AttentionProblem
from aserve.attention.cake_choice import choose_prefill, describe_choice
from aserve.kernels.cake.attention_call import AttentionCall, PagedBatch
from aserve.kernels.cake.paged_prefill import run_prefill
from aserve.kernels.cake.prefill_launch import PLAIN_LAUNCH, PrefillLaunch
from aserve.kernels.cake.prefill_tiles import PrefillTiles, fill_tiles
from aserve.kernels.cake.prefill_variants import PrefillVariant

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
        self._variants = {kind: _choose_variant(problem, kind) for kind in problem.kinds}

    def plan(self, batch: PagedBatch, num_tokens: int) -> ChunkPlan:
        """Make room for the tiles of chunks that have ``num_tokens`` at most."""
        sizes = {_tile_size(kind, _launch(variant)) for kind, variant in self._variants.items()}
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
        launch = _launch(self._variants[kind])
        run_prefill(call, launch, plan.tiles[_tile_size(kind, launch)])

    def kernel_name(self, kind: AttentionKind) -> str:
        """Return the name of the row that serves layers of ``kind``."""
        return self._variants[kind].name


def _launch(variant: PrefillVariant) -> PrefillLaunch:
    return variant.launch or PLAIN_LAUNCH


def _tile_size(kind: AttentionKind, launch: PrefillLaunch) -> tuple[int, int]:
    return kind.num_heads // kind.num_kv_heads, launch.tile_rows


def _choose_variant(problem: AttentionProblem, kind: AttentionKind) -> PrefillVariant:
    choice = choose_prefill(problem, kind)
    if choice.variant is None:
        raise ValueError(f"cake: no variant serves {kind}: {choice.refusals}")
    logger.info("cake: %s", describe_choice(choice, f"chunks, head_dim {kind.head_dim}"))
    return choice.variant
