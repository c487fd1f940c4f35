"""Simulated ranks against dense attention over all keys in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles_attention import make_case, make_problem, make_spec
from doubles_context_parallel import Backends, attend_on_all, check, problem_of

from aserve.attention.base import AttentionBackend, AttentionProblem, CaptureShape, StepLens, StepTables
from aserve.attention.cake_backend import CakeBackend
from aserve.attention.context_parallel import ContextParallelBackend, ContextParallelPlan, own_problem
from aserve.attention.cpu_backend import CpuBackend
from aserve.attention.hybrid import HybridBackend
from aserve.attention.torch_backend import TorchBackend
from aserve.attention.trtllm_backend import TrtllmBackend
from aserve.distributed.context_shard import ContextShard
from aserve.errors import ConfigError

SIZES = [1, 2, 4, 8]
OWN_PAGE_SIZE = 2  # of a rank
SPEC = make_spec(4, 2, 16)
CPU = torch.device("cpu")


def make_torch(problem: AttentionProblem) -> AttentionBackend:
    return TorchBackend(problem, CPU)


def make_cpu(problem: AttentionProblem) -> AttentionBackend:
    return CpuBackend(problem, CPU)


def make_pair(problem: AttentionProblem) -> AttentionBackend:
    """Kernels for decodes under Triton's interpreter."""
    hopper = replace(problem, device_type="cuda", capability=(9, 0))
    return HybridBackend(TorchBackend(problem, CPU, ("prefill",)), CakeBackend(hopper, CPU))


@pytest.mark.parametrize("make_backend", [make_torch, make_cpu])
@pytest.mark.parametrize("size", SIZES)
def test_decodes_of_all_lengths_around_the_borders_of_pages(size: int, make_backend: Backends) -> None:
    """With 8 ranks, sequences of 1 to 7 tokens leave some of them without a key."""
    group = OWN_PAGE_SIZE * size
    key_lens = sorted({1, 2, 3, 7, 8, 9, group - 1 or 1, group, group + 1, 5 * group + 3})
    case = make_case(SPEC, [1] * len(key_lens), key_lens, len(key_lens), page_size=group)
    check(case, SPEC, attend_on_all(case, SPEC, problem_of(case, SPEC, size), size, make_backend))


@pytest.mark.parametrize("make_backend", [make_torch, make_cpu])
@pytest.mark.parametrize("size", SIZES)
def test_chunks_beside_decodes(size: int, make_backend: Backends) -> None:
    """Whole prompts, chunks behind a context, and chunks so short that a rank has no query or no key."""
    group = OWN_PAGE_SIZE * size
    spans = [(1, 3), (1, 1), (1, 1), (2, 2), (3, 12), (group, group), (group + 1, 2 * group + 5), (9, 9), (1, group)]
    case = make_case(SPEC, [query for query, _ in spans], [key for _, key in spans], 2, page_size=group)
    check(case, SPEC, attend_on_all(case, SPEC, problem_of(case, SPEC, size), size, make_backend))


@pytest.mark.parametrize("size", SIZES)
def test_a_lone_first_token_has_a_single_rank_with_keys(size: int) -> None:
    case = make_case(SPEC, [1], [1], 0, page_size=OWN_PAGE_SIZE * size)
    check(case, SPEC, attend_on_all(case, SPEC, problem_of(case, SPEC, size), size, make_torch))


def test_a_pair_of_backends_serves_a_mixed_step() -> None:
    """The kernels' log-sum-exps are merged with those of ranks that have no key of a decode."""
    spec = make_spec(4, 2, 64)
    case = make_case(spec, [1, 1, 1, 6], [1, 2, 75, 9], 3, page_size=2 * 16, dtype=torch.bfloat16)
    problem = problem_of(case, spec, 2, max_num_seqs=4)
    # Triton's interpreter complains of NaN even where the result is not used.
    check(case, spec, attend_on_all(case, spec, problem, 2, make_pair, gap=1e4))


def test_soft_caps_are_part_of_what_is_merged() -> None:
    spec = make_spec(4, 2, 16, softcap=2.0)
    case = make_case(spec, [1, 6], [9, 14], 1, page_size=2 * OWN_PAGE_SIZE)
    check(case, spec, attend_on_all(case, spec, problem_of(case, spec, 2), 2, make_torch))


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
        return planned

    check(case, SPEC, attend_on_all(case, SPEC, problem_of(case, SPEC, size), size, make_torch, plan=plan))


def test_chunks_are_not_captured() -> None:
    shard, problem = ContextShard(0, 2), replace(make_problem(), max_num_seqs=8, max_model_len=64)
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
