"""Any backend over KV that is spread over ranks token by token: each rank attends to its own keys, then all merge.

A query at position p sees the keys at positions 0 .. p, of which a rank has every ``size``th. So of a chunk's queries,
those that stand ``size`` positions apart see one own key more each: for them, attention to the rank's keys is causal as
in any chunk. A chunk becomes up to ``size`` chunks, one for each remainder, and the backend below needs no other mask.

    positions 4 .. 10 of a chunk, rank 1 of 3, which keeps positions 1 4 7 10:
    queries 4 7 10 see 2 3 4 own keys; queries 5 8 see 2 3; queries 6 9 see 2 3
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionProblem,
    AttentionSpec,
    CaptureShape,
    LayerKV,
    LseBase,
    StepLens,
    StepTables,
)
from aserve.attention.merge import convert_lse, merge_stacked
from aserve.distributed.context_shard import ContextShard
from aserve.errors import ConfigError

AllGather = Callable[[Tensor], Tensor]  # [...] of each rank -> [ranks, ...]


@dataclass(frozen=True, slots=True)
class CapturedLens:
    """Key lengths [D] of a captured batch of decodes: of whole sequences, and as the backend below is told."""

    whole: Tensor
    own: Tensor


@dataclass(frozen=True, slots=True)
class ContextParallelPlan:
    """What the rank computes: all D decodes, and those queries of chunks that see a key of its own."""

    inner: Any  # of the backend below; None where nothing is computed
    has_keys: Tensor  # [D] bool; decodes without keys attend to what lies in their first slot, and that is not merged
    tokens: Tensor | None  # [T'] int64, the step's tokens in the order of the plan below; None if that is their own
    captured: CapturedLens | None = None


@dataclass(frozen=True, slots=True)
class OwnSequence:
    """A sequence as the backend below sees it."""

    seq: int  # in the step's batch
    tokens: range  # of the step
    key_len: int


class ContextParallelBackend(AttentionBackend):
    """Serves full causal attention; its pages have ``shard.size`` times as many tokens as those of ``inner``.

    Outputs and LSEs of all ranks are gathered in float32 and merged in the order of ranks, so that all get the same
    bits.
    """

    lse_base: LseBase = "e"

    def __init__(
        self, inner: AttentionBackend, problem: AttentionProblem, shard: ContextShard, all_gather: AllGather
    ) -> None:
        """``inner`` is built for what ``own_problem`` makes of ``problem``, with a page size that it likes."""
        super().__init__(replace(problem, page_size=inner.problem.page_size * shard.size), inner.device)
        self.name = inner.name
        self.kv_order = inner.kv_order
        self.decode_order = inner.decode_order
        self.offset_bits = inner.offset_bits
        self._inner = inner
        self._shard = shard
        self._all_gather = all_gather

    def plan(self, batch: AttentionBatch) -> ContextParallelPlan:
        num_decodes = batch.num_decodes
        has_keys = self._shard.count(batch.key_lens_device[:num_decodes]) > 0
        own = [*self._own_decodes(batch), *self._own_chunks(batch)]
        if num_decodes == len(batch.key_lens):
            return ContextParallelPlan(self._inner.plan(self._own_batch(batch, own)), has_keys, None)
        tokens = np.concatenate([np.asarray(part.tokens, np.int64) for part in own]) if own else np.empty(0, np.int64)
        inner = self._inner.plan(self._own_batch(batch, own)) if own else None
        return ContextParallelPlan(inner, has_keys, self._upload(tokens))

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: ContextParallelPlan,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        gathered = self._all_gather(self._attend(q, layer_kv, plan, spec))
        output, lse = merge_stacked(gathered[..., :-1], gathered[..., -1])
        out = output.to(q.dtype) if out is None else out.copy_(output)
        return out, lse if return_lse else None

    @property
    def captures_decodes(self) -> bool:
        return self._inner.captures_decodes

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> ContextParallelPlan:
        if shape.num_chunks:
            raise ValueError("context parallel: only batches of decodes are captured")
        lens = CapturedLens(tables.key_lens, torch.ones_like(tables.key_lens))
        has_keys = torch.ones(len(lens.own), dtype=torch.bool, device=self.device)
        page_size = self._inner.problem.page_size
        own_tables = StepTables(tables.page_table, tables.rows, lens.own, tables.cu_query_lens, page_size)
        return ContextParallelPlan(self._inner.prepare_capture(shape, own_tables), has_keys, None, lens)

    def convert(self, plan: ContextParallelPlan) -> None:
        if plan.captured is not None:
            counts = self._shard.count(plan.captured.whole)
            torch.gt(counts, 0, out=plan.has_keys)
            torch.clamp(counts, min=1, out=plan.captured.own)
        if plan.inner is not None:
            self._inner.convert(plan.inner)

    def prepare_replay(self, plan: ContextParallelPlan, lens: StepLens) -> None:
        own = np.maximum(self._shard.count(lens.key_lens), 1)
        self._inner.prepare_replay(plan.inner, StepLens(own, lens.cu_query_lens))

    def _attend(self, q: Tensor, layer_kv: LayerKV, plan: ContextParallelPlan, spec: AttentionSpec) -> Tensor:
        """Return output and LSE over the rank's own keys, side by side [T, H, D + 1] float32."""
        own = None
        if plan.inner is not None:
            queries = q if plan.tokens is None else q[plan.tokens]
            output, lse = self._inner.forward(queries, layer_kv, plan.inner, spec, return_lse=True)
            assert lse is not None  # it was asked for
            lse = convert_lse(lse, self._inner.lse_base, "e")
            lse[: len(plan.has_keys)].masked_fill_(~plan.has_keys.unsqueeze(1), -torch.inf)
            own = torch.cat((output.float(), lse.unsqueeze(-1)), -1)
            if plan.tokens is None:
                return own
        num_tokens, num_heads, head_dim = q.shape
        partial = q.new_zeros((num_tokens, num_heads, head_dim + 1), dtype=torch.float32)
        partial[..., -1] = -torch.inf
        if own is not None:
            partial[plan.tokens] = own
        return partial

    def _own_decodes(self, batch: AttentionBatch) -> Iterator[OwnSequence]:
        """Yield all decodes; kernels need not know sequences without keys, so each has one at least."""
        for i in range(batch.num_decodes):
            yield OwnSequence(i, range(i, i + 1), max(1, self._shard.count(batch.key_lens[i])))

    def _own_chunks(self, batch: AttentionBatch) -> Iterator[OwnSequence]:
        size, first = self._shard.size, batch.num_decodes
        for i in range(batch.num_decodes, len(batch.key_lens)):
            query_len, key_len = batch.query_lens[i], batch.key_lens[i]
            num_computed = key_len - query_len
            for offset in range(size):
                # A query ahead of the rank's first key sees none; the next with the same remainder sees one.
                start = offset if self._shard.count(num_computed + offset + 1) else offset + size
                queries = range(start, query_len, size)
                if queries:
                    own_key_len = self._shard.count(num_computed + queries[-1] + 1)
                    yield OwnSequence(i, range(first + start, first + query_len, size), own_key_len)
            first += query_len

    def _own_batch(self, batch: AttentionBatch, own: list[OwnSequence]) -> AttentionBatch:
        query_lens, key_lens = [len(part.tokens) for part in own], [part.key_len for part in own]
        page_size = self._inner.problem.page_size
        page_table = batch.page_table[:, : -(-max(key_lens) // page_size)]
        if len(own) == batch.num_decodes:
            page_table = page_table[: len(own)]
        else:
            page_table = page_table.index_select(0, self._upload(np.array([part.seq for part in own])))
        sums = np.zeros((2, len(own) + 1), np.int32)
        np.cumsum((query_lens, key_lens), 1, out=sums[:, 1:])
        cu_query_lens, cu_key_lens = self._upload(sums)
        return AttentionBatch(
            query_lens=query_lens,
            key_lens=key_lens,
            num_decodes=batch.num_decodes,
            cu_query_lens=cu_query_lens,
            key_lens_device=cu_key_lens.diff(),
            page_table=page_table,
            page_size=page_size,
            cu_key_lens=cu_key_lens,
        )

    def _upload(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)  # torch keeps the pinned copy until it is read


def own_problem(problem: AttentionProblem, shard: ContextShard) -> AttentionProblem:
    """Return what the backend below has to serve; ``page_size`` is that of a rank's pool.

    Raises ConfigError for layers with windows or sinks: what is merged here is attention to all keys and nothing else.
    """
    for is_misfit, what in (
        (any(kind.sliding_window is not None for kind in problem.kinds), "a sliding window"),
        (any(kind.has_sinks for kind in problem.kinds), "attention sinks"),
    ):
        if is_misfit:
            raise ConfigError(f"decode_context_parallel_size {shard.size} cannot serve this model: it has {what}")
    return replace(
        problem,
        max_num_seqs=problem.max_num_seqs * shard.size,  # a chunk becomes as many
        max_model_len=-(-problem.max_model_len // shard.size),
        needs_lse=True,
    )
