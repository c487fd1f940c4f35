"""The index against a search through the whole text."""

import random

import pytest

from aserve.scheduler import ngram_index
from aserve.scheduler.ngram_index import NgramIndex, agreeing_len


def search(token_ids: list[int], min_len: int, max_len: int) -> int | None:
    """Return where the longest run at the end of the text ended before, the latest such place."""
    for length in range(max_len, min_len - 1, -1):
        run = token_ids[-length:]
        for end in range(len(token_ids) - 1, length - 1, -1):
            if len(run) == length and token_ids[end - length : end] == run:
                return end
    return None


@pytest.mark.parametrize("max_part_entries", [8192, 10])
@pytest.mark.parametrize(("min_len", "max_len"), [(1, 1), (1, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("vocab_size", [2, 4, 8])
def test_every_end_of_a_growing_text_is_found_as_by_search(
    min_len: int, max_len: int, vocab_size: int, max_part_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram_index, "MAX_PART_ENTRIES", max_part_entries)
    rng = random.Random(vocab_size)
    index, token_ids, num_found = NgramIndex(min_len, max_len), list[int](), 0
    for _ in range(200):
        token_ids += [rng.randrange(vocab_size) for _ in range(rng.choice((1, 1, 1, 4)))]
        index.extend(token_ids, 1000)
        assert index.num_indexed == len(token_ids) - 1
        found = index.find(token_ids)
        assert found == search(token_ids, min_len, max_len)
        num_found += found is not None
    assert num_found > 10


def test_a_long_prompt_is_taken_in_by_parts() -> None:
    token_ids = [number % 7 for number in range(100)]
    whole, parts = NgramIndex(2, 3), NgramIndex(2, 3)
    assert whole.extend(token_ids, 1000) == 99
    taken = [parts.extend(token_ids, 40) for _ in range(4)]
    assert taken == [40, 40, 19, 0]
    assert parts.find(token_ids) == whole.find(token_ids) == 100 - 7
    assert parts.num_entries == whole.num_entries == 14


def test_no_part_outgrows_its_bound_by_more_than_one_call() -> None:
    """A dict that grows moves all its entries, and one that is freed drops them: so much more work has the call."""
    index, token_ids = NgramIndex(2, 4), list(range(40_000))
    while index.num_indexed < len(token_ids) - 1:
        index.extend(token_ids, 512)
    assert index.num_entries == 3 * 39_999 - (1 + 2 + 3)
    assert max(map(len, index.parts)) <= ngram_index.MAX_PART_ENTRIES + 3 * 512


def test_runs_of_equal_hashes_are_told_apart() -> None:
    assert hash(-1) == hash(-2)  # no token ids, but the shortest way to a collision
    index, token_ids = NgramIndex(1, 1), [-1, 5, -2]
    index.extend(token_ids, 10)
    assert hash((-1,)) == hash((-2,))
    assert index.find(token_ids) is None


def test_how_far_back_two_places_agree_is_counted_by_comparing_ever_longer_runs() -> None:
    rng = random.Random(3)
    lens = set()
    for _ in range(500):
        token_ids = [rng.randrange(2) for _ in range(rng.randint(2, 40))]
        end, max_len = rng.randrange(1, len(token_ids)), rng.choice((1, 4, 50))
        runs = (length for length in range(1, min(end, max_len) + 1))
        agreeing = [length for length in runs if token_ids[end - length : end] == token_ids[-length:]]
        assert agreeing_len(token_ids, end, max_len) == max(agreeing, default=0)
        lens.add(len(agreeing))
    assert lens >= set(range(6))
