"""The cake family's split decode with several queries of a sequence, against dense attention in float64."""

import dataclasses
from typing import Any

import pytest
import torch
from doubles_attention import dense_attention, make_spec
from doubles_cake import FORMATS, NUM_PROGRAMS, SINKS, check, chunks, launch_for, make_call, run_split
from torch import Tensor

from aserve.kernels.cake.attention_call import AttentionCall
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule
from aserve.kernels.cake.plain_decode import run_plain_decode
from aserve.kernels.cake.split_decode import PartialResults, run_split_decode
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.nvfp4 import element_bytes

MAX_QUERIES = 4


def run(call: AttentionCall, num_programs: int = NUM_PROGRAMS, max_queries: int = MAX_QUERIES) -> None:
    run_split(call, num_programs, max_queries)


EDGES = [(1, 1), (4, 4), (2, 16), (3, 17), (4, 15), (4, 90), (1, 33)]


@pytest.mark.parametrize(
    ("dtype", "sizes"), [(torch.float32, EDGES), (torch.float16, EDGES[3:5]), (torch.bfloat16, EDGES[3:5])]
)
def test_ragged_queries_and_keys_at_the_edges_of_blocks(dtype: torch.dtype, sizes: list[tuple[int, int]]) -> None:
    spec = make_spec(3, 1, 64)
    case = chunks(spec, sizes, dtype=dtype)
    call = make_call(case, spec)
    run(call)
    check(call, case, spec)


@pytest.mark.parametrize("num_programs", [1, 5, 40])
def test_any_number_of_programs_gives_the_same(num_programs: int) -> None:
    """Down to a program for each two blocks, so that the last queries' own keys stand in a share of their own."""
    spec = make_spec(2, 1, 64)
    case = chunks(spec, [(2, 1060 if num_programs == 40 else 150), (2, 2), (4, 34)])
    call = make_call(case, spec)
    run(call, num_programs)
    check(call, case, spec)


@pytest.mark.parametrize(("group", "max_queries", "head_dim"), [(1, 2, 96), (5, 8, 64)])
def test_groups_and_most_queries(group: int, max_queries: int, head_dim: int) -> None:
    spec = make_spec(group, 1, head_dim)
    case = chunks(spec, [(max_queries, 35), (max_queries - 1, 20)], page_size=3)
    call = make_call(case, spec)
    run(call, max_queries=max_queries)
    check(call, case, spec)


RULES: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 14},
    {"sliding_window": 37, "softcap": 2.0, "sinks": SINKS},
    {"sinks": SINKS},
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules))
def test_windows_caps_and_sinks(rules: dict[str, Any]) -> None:
    """Windows that end in the middle of a block: the last queries see none of the first program's keys."""
    spec = make_spec(4, 1, 64, **rules)
    case = chunks(spec, [(4, 60), (1, 37), (3, 100)])
    call = make_call(case, spec, has_lse="softcap" not in rules)
    run(call, 9)
    check(call, case, spec)


def test_keys_outside_the_windows_are_not_read() -> None:
    spec = make_spec(2, 1, 64, sliding_window=20)
    case = chunks(spec, [(4, 90)])
    call = make_call(case, spec)
    for pages in (case.layer_kv.key, case.layer_kv.value):
        pages[case.batch.page_table[0, :4].long()] = torch.nan  # keys 0 to 63; the first query sees 67 on
    run(call)
    check(call, case, spec)


@pytest.mark.parametrize("kv_dtype", FORMATS.values(), ids=FORMATS)
def test_pages_of_few_bits(kv_dtype: torch.dtype) -> None:
    spec = make_spec(2, 1, 64)
    case = chunks(spec, [(4, 16), (3, 47)], dtype=torch.bfloat16, kv_dtype=kv_dtype, scales=(0.25, 0.5))
    call = make_call(case, spec)
    run(call)
    check(call, case, spec)


@pytest.mark.parametrize("kv_dtype", FORMATS.values(), ids=FORMATS)
def test_pages_of_few_bits_whose_keys_are_dealt_to_warps(kv_dtype: torch.dtype) -> None:
    """Windows begin within the keys of a warp; of three keys the second warp has none."""
    spec = make_spec(2, 1, 64, sliding_window=37, softcap=2.0, sinks=SINKS[:2])
    case = chunks(spec, [(3, 3), (4, 75)], kv_dtype=kv_dtype, scales=(0.25, 0.5))
    call = make_call(case, spec)
    launch = SplitLaunch(64, num_warps=2, num_stages=2, programs_per_sm=1)
    assert launch.is_apart(64, MAX_QUERIES * call.group, element_bytes(kv_dtype))
    run_split(call, max_queries=MAX_QUERIES, launch=launch)
    check(call, case, spec)


def test_twice_the_same_is_bitwise_the_same() -> None:
    spec = make_spec(2, 1, 64)
    case = chunks(spec, [(4, 100), (2, 3)], dtype=torch.bfloat16)
    results: list[Tensor] = []
    for _ in range(2):
        call = make_call(case, spec)
        run(call)
        results.append(call.out)
    assert torch.equal(*results)


def test_sequences_without_queries_or_with_too_many_are_left_alone() -> None:
    """As in a step whose longer chunks another kernel computes; the first and the last sequence, too."""
    spec = make_spec(2, 1, 64)
    sizes = [(5, 40), (4, 40), (6, 70), (9, 9), (2, 33), (5, 18)]
    case = chunks(spec, sizes)
    call = make_call(case, spec)
    starts = case.batch.cu_query_lens.tolist()
    served = [
        token for i, (queries, _) in enumerate(sizes) if queries <= 4 for token in range(starts[i], starts[i + 1])
    ]
    run(call)
    expected, expected_lse = dense_attention(case, spec)
    assert call.lse is not None
    torch.testing.assert_close(call.out[served].double().cpu(), expected[served], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call.lse[served].double().cpu(), expected_lse[served], rtol=1e-5, atol=1e-5)
    others = sorted(set(range(len(case.q))) - set(served))
    assert call.out[others].isnan().all()
    assert call.lse[others].isnan().all()
    empty = torch.zeros_like(case.batch.cu_query_lens)
    nothing = dataclasses.replace(call, out=torch.full_like(call.out, torch.nan))
    nothing = dataclasses.replace(nothing, batch=dataclasses.replace(call.batch, cu_query_lens=empty))
    run(nothing)
    assert nothing.out.isnan().all()


def test_what_does_not_fit_together_is_refused_by_name() -> None:
    spec = make_spec(2, 1, 64)
    call = make_call(chunks(spec, [(2, 9)]), spec)
    schedule = DecodeSchedule.allocate(1, 2, call.q.device, 4)
    partials = PartialResults.allocate(2, 8, 64, call.q.device)
    single = dataclasses.replace(call.batch, cu_query_lens=None)
    with pytest.raises(ValueError, match="cu_query_lens: must be given where a sequence has up to 4 queries"):
        fill_schedule(schedule, single, launch_for(call), window=None, num_kv_heads=1)
    with pytest.raises(ValueError, match="cu_query_lens: must be given where a sequence has up to 4 queries"):
        run_split_decode(dataclasses.replace(call, batch=single), launch_for(call), schedule, partials)
    small = PartialResults.allocate(2, 7, 64, call.q.device)
    with pytest.raises(ValueError, match="partials: too small for 2 programs of 8 rows of 64"):
        run_split_decode(call, launch_for(call), schedule, small)
    with pytest.raises(ValueError, match="cu_query_lens: the plain kernel takes one query of each sequence"):
        run_plain_decode(call)
