"""The chunks of a step on the cake family: which launch computes them, and how they are cut into tiles."""

import logging
from dataclasses import dataclass

import torch

from aserve.attention.base import AttentionKind, AttentionProblem
from aserve.attention.cake_choice import choose_prefill, describe_choice
from aserve.attention.cake_decodes import CakeDecodes, DecodePlan
from aserve.kernels.cake.attention_call import AttentionCall, PagedBatch
from aserve.kernels.cake.paged_prefill import run_prefill
from aserve.kernels.cake.prefill_launch import plain_launch
from aserve.kernels.cake.prefill_tiles import PrefillTiles, fill_tiles
from aserve.kernels.cake.prefill_variants import PrefillVariant

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TileSize:
    """How layers cut chunks."""

    group: int
    tile_rows: int
    min_query_len: int  # of a chunk that is cut at all


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A step's chunks, and their tiles in each way that layers cut them."""

    batch: PagedBatch
    tiles: dict[TileSize, PrefillTiles]
    drafts: DecodePlan | None  # that serves the short ones of some kinds of layers


class CakeChunks:
    """Plans and runs prefill chunks for all kinds of a problem's layers."""

    def __init__(self, problem: AttentionProblem, device: torch.device) -> None:
        self._device = device
        self._variants = {kind: _choose_variant(problem, kind) for kind in problem.kinds}
        plain = plain_launch(problem.dtype, problem.kv_dtype)
        self._launches = {kind: variant.launch or plain for kind, variant in self._variants.items()}
        self._drafts = CakeDecodes.for_drafts(problem, device) if problem.max_drafts else None

    def plan(self, batch: PagedBatch, num_tokens: int) -> ChunkPlan:
        """Make room for the tiles of chunks that have ``num_tokens`` at most."""
        tiles = {
            size: PrefillTiles.allocate(num_tokens, len(batch.rows), size.group, size.tile_rows, self._device)
            for size in {self._tile_size(kind) for kind in self._variants}
        }
        return ChunkPlan(batch, tiles, None if self._drafts is None else self._drafts.plan(batch))

    def cut(self, plan: ChunkPlan) -> None:
        """Enqueue what tells each program its tile."""
        assert plan.batch.cu_query_lens is not None, "chunks have them"
        for size, tiles in plan.tiles.items():
            fill_tiles(tiles, plan.batch.cu_query_lens, group=size.group, min_query_len=size.min_query_len)
        if plan.drafts is not None and self._drafts is not None:
            self._drafts.share_out(plan.drafts)

    def attend(self, call: AttentionCall, plan: ChunkPlan, kind: AttentionKind) -> None:
        """Enqueue one layer's kernels: each takes the chunks of its lengths, as it finds them on the device."""
        self._variants[kind].check(call)
        run_prefill(call, self._launches[kind], plan.tiles[self._tile_size(kind)])
        if plan.drafts is not None and self._drafts is not None and kind in plan.drafts.variants:
            self._drafts.attend(call, plan.drafts, kind)

    def kernel_name(self, plan: ChunkPlan, kind: AttentionKind) -> str:
        """Return the name of the row that serves layers of ``kind``, behind that of one that verifies their drafts."""
        name = self._variants[kind].name
        if plan.drafts is None or self._drafts is None or kind not in plan.drafts.variants:
            return name
        return f"{self._drafts.kernel_name(plan.drafts, kind)}, {name}"

    def _tile_size(self, kind: AttentionKind) -> TileSize:
        min_query_len = 1 if self._drafts is None else self._drafts.max_query_len(kind) + 1
        return TileSize(kind.num_heads // kind.num_kv_heads, self._launches[kind].tile_rows, min_query_len)


def _choose_variant(problem: AttentionProblem, kind: AttentionKind) -> PrefillVariant:
    choice = choose_prefill(problem, kind)
    if choice.variant is None:
        raise ValueError(f"cake: no variant serves {kind}: {choice.refusals}")
    logger.info("cake: %s", describe_choice(choice, f"chunks, head_dim {kind.head_dim}"))
    return choice.variant
