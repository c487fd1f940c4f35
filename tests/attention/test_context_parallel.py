"""Ranks simulated in one process, a thread each, against dense attention over all keys in float64."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest
import torch
from doubles_attention import PagedCase, dense_attention, make_case, make_problem, make_spec
from torch import Tensor

from aserve.attention.base import (
    AttentionBackend,
    AttentionKind,
    AttentionProblem,
    AttentionSpec,
    CaptureShape,
    LayerKV,
    StepLens,
    StepTables,
)
from aserve.attention.context_parallel import ContextParallelBackend, ContextParallelPlan, own_problem
from aserve.attention.cpu_backend import CpuBackend
from aserve.attention.torch_backend import TorchBackend
from aserve.attention.trtllm_backend import TrtllmBackend
from aserve.distributed.context_shard import ContextShard
from aserve.errors import ConfigError

SIZES = [1, 2, 4, 8]
OWN_PAGE_SIZE = 2  # of a rank
SPEC = make_spec(4, 2, 16)
EXACT = {"rtol": 1e-5, "atol": 1e-5}


class GatheringThreads:
    """What each rank's ``all_gather`` does where ranks are threads."""

    def __init__(self, size: int) -> None:
        self._tensors: list[Tensor | None] = [None] * size
        self._barrier = Barrier(size, timeout=20)

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def all_gather(tensor: Tensor) -> Tensor:
            self._tensors[rank] = tensor
            self._barrier.wait()
            gathered = torch.stack([one for one in self._tensors if one is not None])
            self._barrier.wait()
            return gathered

        return all_gather


def spread(case: PagedCase, shard: ContextShard) -> LayerKV:
    """What the pool of a rank holds of ``case``; NaN where another rank's token would lie."""
    batch, num_pages = case.batch, case.layer_kv.key.shape[0]
    own_size = batch.page_size // shard.size
    pools = [
        torch.full((num_pages + 1, own_size, *pool.shape[2:]), torch.nan)
        for pool in (case.layer_kv.key, case.layer_kv.value)
    ]
    for i, key_len in enumerate(batch.key_lens):
        positions = torch.arange(key_len)
        pages = batch.page_table[i, positions // batch.page_size].long()
        slots = shard.slots(pages, positions, batch.page_size, num_pages)
        for pool, dense in zip(pools, (case.keys[i], case.values[i]), strict=True):
            pool.view(-1, *pool.shape[2:])[slots] = dense
    for pool in pools:
        pool[num_pages] = torch.nan  # the dummy page, where the tokens of others went
    return LayerKV(*pools)


def problem_of(spec: AttentionSpec, shard: ContextShard) -> AttentionProblem:
    kind = AttentionKind(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, softcap=spec.softcap)
    return AttentionProblem(
        "cpu", torch.float32, torch.float32, OWN_PAGE_SIZE, (kind,), max_num_seqs=8, max_model_len=64
    )


Backends = Callable[[AttentionProblem], AttentionBackend]
Plan = Callable[[ContextParallelBackend], ContextParallelPlan]


def make_torch(problem: AttentionProblem) -> AttentionBackend:
    return TorchBackend(problem, torch.device("cpu"))


def make_cpu(problem: AttentionProblem) -> AttentionBackend:
    return CpuBackend(problem, torch.device("cpu"))


def attend_on_all(
    case: PagedCase, spec: AttentionSpec, size: int, make_backend: Backends, plan: Plan | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return (output, LSE) of each rank."""
    threads = GatheringThreads(size)

    def attend(rank: int) -> tuple[Tensor, Tensor]:
        shard = ContextShard(rank, size)
        problem = problem_of(spec, shard)
        backend = ContextParallelBackend(make_backend(own_problem(problem, shard)), problem, shard, threads.of(rank))
        assert backend.problem.page_size == case.batch.page_size
        planned = plan(backend) if plan else backend.plan(case.batch)
        output, lse = backend.forward(case.q, spread(case, shard), planned, spec, return_lse=True)
        assert lse is not None
        return output, lse

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(attend, range(size)))


def check(case: PagedCase, spec: AttentionSpec, results: list[tuple[Tensor, Tensor]]) -> None:
    """Every rank has the same bits, and they are right."""
    expected, expected_lse = dense_attention(case, spec)
    for output, lse in results:
        assert torch.equal(output, results[0][0])
        assert torch.equal(lse, results[0][1])
    torch.testing.assert_close(results[0][0].double(), expected, **EXACT)
    torch.testing.assert_close(results[0][1].double(), expected_lse, **EXACT)


@pytest.mark.parametrize("make_backend", [make_torch, make_cpu])
@pytest.mark.parametrize("size", SIZES)
def test_decodes_of_all_lengths_around_the_borders_of_pages(size: int, make_backend: Backends) -> None:
    """With 8 ranks, sequences of 1 to 7 tokens leave some of them without a key."""
    group = OWN_PAGE_SIZE * size
    key_lens = sorted({1, 2, 3, 7, 8, 9, group - 1 or 1, group, group + 1, 5 * group + 3})
    case = make_case(SPEC, [1] * len(key_lens), key_lens, len(key_lens), page_size=group)
    check(case, SPEC, attend_on_all(case, SPEC, size, make_backend))


@pytest.mark.parametrize("make_backend", [make_torch, make_cpu])
@pytest.mark.parametrize("size", SIZES)
def test_chunks_beside_decodes(size: int, make_backend: Backends) -> None:
    """Whole prompts, chunks behind a context, and chunks so short that a rank has no query or no key."""
    group = OWN_PAGE_SIZE * size
    spans = [(1, 3), (1, 1), (1, 1), (2, 2), (3, 12), (group, group), (group + 1, 2 * group + 5), (9, 9), (1, group)]
    case = make_case(SPEC, [query for query, _ in spans], [key for _, key in spans], 2, page_size=group)
    check(case, SPEC, attend_on_all(case, SPEC, size, make_backend))


@pytest.mark.parametrize("size", SIZES)
def test_a_lone_first_token_has_a_single_rank_with_keys(size: int) -> None:
    case = make_case(SPEC, [1], [1], 0, page_size=OWN_PAGE_SIZE * size)
    check(case, SPEC, attend_on_all(case, SPEC, size, make_torch))


def test_soft_caps_are_part_of_what_is_merged() -> None:
    spec = make_spec(4, 2, 16, softcap=2.0)
    case = make_case(spec, [1, 6], [9, 14], 1, page_size=2 * OWN_PAGE_SIZE)
    check(case, spec, attend_on_all(case, spec, 2, make_torch))


@pytest.mark.parametrize("size", SIZES)
def test_a_captured_batch_is_replayed_for_other_lengths(size: int) -> None:
    """Tables and lengths change between capture and replay, as a graph finds them."""
    key_lens = [1, 5, 4 * size, 21]
    case = make_case(SPEC, [1] * 4, key_lens, 4, page_size=OWN_PAGE_SIZE * size)

    def plan(backend: ContextParallelBackend) -> ContextParallelPlan:
        tables = StepTables(
            page_table=torch.zeros_like(case.batch.page_table),
            rows=torch.arange(4, dtype=torch.int32),
            key_lens=torch.ones(4, dtype=torch.int32),
            cu_query_lens=torch.tensor([4], dtype=torch.int32),
            page_size=case.batch.page_size,
        )
        planned = backend.prepare_capture(CaptureShape(4, 4, 0), tables)
        tables.page_table.copy_(case.batch.page_table)
        tables.key_lens.copy_(case.batch.key_lens_device)
        backend.prepare_replay(planned, StepLens(np.array(key_lens, np.int32), np.array([4], np.int32)))
        backend.convert(planned)
        return planned

    check(case, SPEC, attend_on_all(case, SPEC, size, make_torch, plan))


def test_chunks_are_not_captured() -> None:
    shard = ContextShard(0, 2)
    problem = problem_of(SPEC, shard)
    backend = ContextParallelBackend(make_torch(own_problem(problem, shard)), problem, shard, lambda tensor: tensor)
    assert backend.captures_decodes
    assert not backend.captures_chunks
    empty = torch.empty(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="only batches of decodes"):
        backend.prepare_capture(CaptureShape(4, 0, 1), StepTables(empty, empty, empty, empty, 4))


@pytest.mark.parametrize(
    ("kind", "what"), [({"sliding_window": 64}, "a sliding window"), ({"has_sinks": True}, "attention sinks")]
)
def test_windows_and_sinks_are_refused(kind: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=f"decode_context_parallel_size 2 cannot serve this model: it has {what}"):
        own_problem(make_problem(**kind), ContextShard(1, 2))


def test_a_kernel_without_log_sum_exps_is_refused() -> None:
    hopper = make_problem("cuda", torch.bfloat16, num_heads=8, num_kv_heads=8, head_dim=128)
    hopper = replace(hopper, capability=(9, 0))
    assert TrtllmBackend.refuse(hopper, "decode") is None
    assert "log-sum-exp" in (TrtllmBackend.refuse(own_problem(hopper, ContextShard(0, 2)), "decode") or "")


@pytest.mark.parametrize("size", SIZES)
def test_every_token_has_one_rank_and_a_slot_of_its_own(size: int) -> None:
    page_size, dummy_page = 2 * size, 99
    positions = torch.arange(5 * page_size)
    pages = torch.tensor([7, 3, 0, 12, 5])[positions // page_size]
    owned = torch.zeros(len(positions), dtype=torch.long)
    for rank in range(size):
        shard = ContextShard(rank, size)
        slots = shard.slots(pages, positions, page_size, dummy_page)
        is_own = slots != dummy_page * 2
        owned += is_own
        assert positions[is_own].tolist() == list(range(rank, len(positions), size))
        assert len(set(slots[is_own].tolist())) == is_own.sum()
        assert torch.equal(slots[is_own] // 2, pages[is_own])
        counts = [shard.count(length) for length in range(20)]
        assert counts == [len(range(rank, length, size)) for length in range(20)]
    assert owned.tolist() == [1] * len(positions)
