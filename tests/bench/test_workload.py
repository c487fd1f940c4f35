"""Workloads are those that were published, and the same each time."""

import random

import pytest

from aserve.bench.workload import WORKLOADS, LengthRange, WorkloadShape, random_workload


def test_the_mixed_workload_is_the_published_one() -> None:
    items = random_workload(WORKLOADS["mixed256"], 151936)
    assert sum(item.output_len for item in items) == 133_966
    rng = random.Random(0)  # the public benches' own lines, with their module-level seed
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    assert [item.prompt_token_ids for item in items] == prompts
    assert [item.output_len for item in items] == [rng.randint(100, 1024) for _ in range(256)]


@pytest.mark.parametrize("vocab_size", [50, 151936])
def test_variants_have_the_same_lengths_and_no_common_beginning(vocab_size: int) -> None:
    shape = WorkloadShape(40, LengthRange(20, 60), LengthRange(1, 9), seed=5)
    runs = [random_workload(shape, vocab_size, variant) for variant in range(3)]
    sizes = [[(len(item.prompt_token_ids), item.output_len) for item in run] for run in runs]
    assert sizes[0] == sizes[1] == sizes[2]
    beginnings = {tuple(item.prompt_token_ids[:16]) for run in runs for item in run}
    assert len(beginnings) == 120
    assert all(0 <= i < vocab_size for run in runs for item in run for i in item.prompt_token_ids)


def test_lengths_reach_both_ends() -> None:
    items = random_workload(WorkloadShape(200, LengthRange(3, 5), LengthRange(7, 7)), 100)
    assert {len(item.prompt_token_ids) for item in items} == {3, 4, 5}
    assert {item.output_len for item in items} == {7}


@pytest.mark.parametrize(("text", "low", "high"), [("128", 128, 128), ("100:1024", 100, 1024), ("5:5", 5, 5)])
def test_lengths_are_read_and_written(text: str, low: int, high: int) -> None:
    lengths = LengthRange.parse(text)
    assert lengths == LengthRange(low, high)
    assert LengthRange.parse(str(lengths)) == lengths


@pytest.mark.parametrize("text", ["", "0", "-1", "9:8", "a", "1:2:3", ":4", "4:x"])
def test_other_texts_are_no_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number of tokens nor LOW:HIGH"):
        LengthRange.parse(text)
