"""Ranks simulated in one process: each attends twice, first to learn what it gives, then with what all have given."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from doubles_attention import PagedCase, check_attention
from torch import Tensor

from aserve.attention.base import AttentionBackend, AttentionProblem, AttentionSpec, LayerKV
from aserve.attention.context_parallel import ContextParallelBackend, ContextParallelPlan, own_problem
from aserve.distributed.context_shard import ContextShard

Backends = Callable[[AttentionProblem], AttentionBackend]
Plan = Callable[[ContextParallelBackend], ContextParallelPlan]


@dataclass
class GivenTensors:
    """What each rank's ``all_gather`` was given; until all have given theirs it returns the caller's over and over."""

    size: int
    tensors: dict[int, Tensor] = field(default_factory=dict)

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def all_gather(tensor: Tensor) -> Tensor:
            if len(self.tensors) < self.size:
                self.tensors[rank] = tensor
                return torch.stack([tensor] * self.size)
            return torch.stack([self.tensors[one] for one in range(self.size)])

        return all_gather


def spread(case: PagedCase, shard: ContextShard, order: str, gap: float) -> LayerKV:
    """Return what the pool of a rank holds of ``case``: ``gap`` where another rank's token would lie."""
    batch, num_pages = case.batch, case.layer_kv.key.shape[0]
    own_size = batch.page_size // shard.size
    pools = []
    for dense in (case.keys, case.values):
        pool = dense[0].new_full((num_pages + 1, own_size, *dense[0].shape[1:]), gap)
        for i, key_len in enumerate(batch.key_lens):
            positions = torch.arange(key_len, device=pool.device)
            pages = batch.page_table[i, positions // batch.page_size].long()
            pool.view(-1, *pool.shape[2:])[shard.slots(pages, positions, batch.page_size, num_pages)] = dense[i]
        pool[num_pages] = gap  # the dummy page, where the tokens of others went
        pools.append(pool if order == "NHD" else pool.transpose(1, 2).contiguous().transpose(1, 2))
    return LayerKV(*pools)


def attend_on_all(
    case: PagedCase,
    spec: AttentionSpec,
    problem: AttentionProblem,
    size: int,
    make: Backends,
    *,
    plan: Plan | None = None,
    gap: float = torch.nan,
) -> list[tuple[Tensor, Tensor]]:
    """Return (output, LSE) of each of ``size`` ranks; ``problem`` has a rank's page size, ``plan`` plans the case.

    Pages hold ``gap`` where the rank has no key.
    """
    given, results = GivenTensors(size), []
    for _ in range(2):
        results.clear()
        for rank in range(size):
            shard = ContextShard(rank, size)
            backend = ContextParallelBackend(make(own_problem(problem, shard)), problem, shard, given.of(rank))
            assert backend.problem.page_size == case.batch.page_size
            planned = plan(backend) if plan else backend.plan(case.batch)
            backend.convert(planned)
            layer_kv = spread(case, shard, backend.kv_order, gap)
            output, lse = backend.forward(case.q, layer_kv, planned, spec, return_lse=True)
            assert lse is not None
            results.append((output, lse))
    return results


def problem_of(case: PagedCase, spec: AttentionSpec, size: int, **fields: object) -> AttentionProblem:
    """Return the problem of a rank's pool, whose pages have a ``size``th of the case's."""
    dtype = case.q.dtype
    problem = AttentionProblem(case.q.device.type, dtype, dtype, case.batch.page_size // size, (spec.kind,))
    return replace(problem, **fields)  # type: ignore[arg-type]


def check(case: PagedCase, spec: AttentionSpec, results: list[tuple[Tensor, Tensor]]) -> None:
    """Every rank has the same bits, and they are near those of dense attention in float64."""
    for output, lse in results:
        assert torch.equal(output, results[0][0])
        assert torch.equal(lse, results[0][1])
    check_attention(*results[0], case, spec)
