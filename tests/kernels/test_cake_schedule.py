"""The shares of programs, against shares dealt out in Python."""

import pytest
import torch

from aserve.kernels.cake.attention_call import PagedBatch
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule, is_cut
from aserve.kernels.cake.split_launch import MIN_UNITS, SplitLaunch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def units_of(key_lens: list[int], window: int | None, block_len: int) -> list[int]:
    """Two for the start of a pair, one for each block."""
    seen = [min(key_len, window or key_len) for key_len in key_lens]
    return [2 - (-count // block_len) for count in seen]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_programs", [1, 5, 40])
@pytest.mark.parametrize(
    "key_lens",
    [[1], [300], [16, 32, 48], [1, 15, 16, 17, 31, 33], [5000, 1, 1, 1], [(i * 37) % 90 + 1 for i in range(600)]],
    ids=["one key", "one sequence", "full blocks", "edges", "ragged", "many"],
)
def test_shares_are_equal_and_begin_in_the_right_sequence(
    key_lens: list[int], num_programs: int, window: int | None
) -> None:
    num_kv_heads, block_len = 2, 16
    schedule = DecodeSchedule.allocate(len(key_lens), num_programs, torch.device(DEVICE))
    schedule.starts.fill_(-77)
    schedule.first_seqs.fill_(-77)
    lens = torch.tensor(key_lens, dtype=torch.int32, device=DEVICE)
    batch = PagedBatch(page_table=lens[None], rows=torch.zeros_like(lens), key_lens=lens, page_size=16)
    launch = SplitLaunch(block_len, num_warps=4, num_stages=2, programs_per_sm=1)
    fill_schedule(schedule, batch, launch, window=window, num_kv_heads=num_kv_heads)
    counts = units_of(key_lens, window, block_len)
    assert schedule.starts.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]
    owners = [seq for seq, count in enumerate(counts) for _ in range(count * num_kv_heads)]  # of each unit
    num_active = max(min(num_programs, len(owners) // MIN_UNITS), 1)
    share, num_longer = divmod(len(owners), num_active)
    first_seqs, unit = [], 0
    for program in range(num_active):
        first_seqs.append(owners[unit])
        unit += share + (program < num_longer)
    assert unit == len(owners)
    assert schedule.first_seqs.tolist()[:num_active] == first_seqs


@pytest.mark.parametrize("max_queries", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 13, 14, 16, 17, 40])
def test_pairs_of_one_block_need_no_merge(window: int | None, max_queries: int) -> None:
    """By the most blocks that the schedule gives a sequence of any length and number of queries."""
    sizes = [(queries, keys) for queries in range(1, max_queries + 1) for keys in range(queries, 60)]
    query_lens, key_lens = torch.tensor(sizes, dtype=torch.int32, device=DEVICE).T
    starts = torch.nn.functional.pad(query_lens.cumsum(0, dtype=torch.int32), (1, 0)) if max_queries > 1 else None
    schedule = DecodeSchedule.allocate(len(sizes), 3, torch.device(DEVICE), max_queries)
    batch = PagedBatch(key_lens[None], torch.zeros_like(key_lens), key_lens.contiguous(), 16, starts)
    launch = SplitLaunch(16, num_warps=4, num_stages=2, programs_per_sm=1)
    fill_schedule(schedule, batch, launch, window=window, num_kv_heads=1)
    most_blocks = int(schedule.starts.diff().max()) - 2
    assert is_cut(window, max_queries, 16) == (most_blocks > 1)
