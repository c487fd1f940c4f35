"""Drafts from a sequence's own text: what stood there before, how many, and when none are made."""

from itertools import pairwise
from time import thread_time

import pytest
from doubles_scheduler import make_request

from aserve.cache.radix_tree import RadixTree
from aserve.scheduler import ngram_drafter
from aserve.scheduler.ngram_drafter import NgramDrafter, NgramSettings
from aserve.scheduler.ngram_index import MAX_PART_ENTRIES
from aserve.scheduler.sequence import Sequence, Status

MAX_RATIO = 12.0  # of an append; measured: 5 to 7


def make_drafter(num_tokens: int = 4) -> NgramDrafter:
    return NgramDrafter(NgramSettings(num_tokens, min_len=2, max_len=3))


def make_sequence(token_ids: list[int], num_pending: int = 0) -> Sequence:
    return Sequence(
        request=make_request("r", token_ids),
        seed=0,
        rank=(0, 0),
        stop_token_ids=frozenset(),
        max_len=10_000,
        token_ids=list(token_ids),
        prompt_len=len(token_ids),
        node=RadixTree(4).root,
        status=Status.DECODING,
        num_computed=len(token_ids) - 1 + num_pending,
    )


def propose(drafter: NgramDrafter, *batch: Sequence) -> list[list[int]]:
    return [[] if draft is None else draft.token_ids for draft in drafter.propose(list(batch))]


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 1, 2], [3, 4]),  # two tokens that stood there before
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3]),  # three tell more than two that are nearer
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1]),  # the nearest of equals
        ([8, 9, 1, 2, 3, 4, 7, 9, 1, 2, 3], [4, 7, 9, 1]),  # four agree, one more than is looked up
        ([1, 2, 3, 4, 5], []),
        ([7, 7, 7], [7, 7]),  # the text goes round
        ([1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2, 3]),
        ([7], []),
    ],
)
def test_drafts_are_what_followed_the_same_tokens_as_many_as_agree(token_ids: list[int], expected: list[int]) -> None:
    assert propose(make_drafter(), make_sequence(token_ids)) == [expected]


@pytest.mark.parametrize(("num_pending", "expected"), [(0, [3, 4, 5]), (1, [4, 5, 6]), (2, [5, 6, 9])])
def test_tokens_in_flight_are_taken_to_be_what_was_found_for_them(num_pending: int, expected: list[int]) -> None:
    seq = make_sequence([0, 1, 2, 3, 4, 5, 6, 9, 0, 1, 2], num_pending)
    assert propose(make_drafter(), seq) == [expected]


def test_half_as_many_tokens_are_expected_as_agree_but_no_more_than_are_drafted() -> None:
    drafter = make_drafter(num_tokens=4)
    text = list(range(20))
    copies = [make_sequence([*text, 50, *text[5 : 5 + length]]) for length in (2, 3, 5, 8, 12)]
    drafts = drafter.propose(copies)
    assert [len(draft.token_ids) for draft in drafts] == [2, 3, 4, 4, 4]
    assert [draft.num_expected for draft in drafts] == [1.0, 1.5, 2.5, 4.0, 4.0]


def test_what_agreed_before_a_wrong_draft_counts_no_longer() -> None:
    drafter, text = make_drafter(), list(range(20))
    seq = make_sequence([*text, *text[:12]])
    assert propose(drafter, seq) == [[12, 13, 14, 15]]
    seq.token_ids += [50, 5, 6]  # none of these, but a few words that stand there too
    seq.num_computed += 3
    (draft,) = drafter.propose([seq])
    assert (draft.token_ids, draft.num_expected) == ([7, 8], 1.0)


def test_long_prompts_take_several_steps_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_drafter, "MAX_INDEXED_RUNS", 200)  # two a token
    drafter = make_drafter()
    long, other, short = make_sequence([1, 2] * 75), make_sequence([3, 4] * 75), make_sequence([5, 6, 5, 6])
    results = [list(map(bool, propose(drafter, long, other, short))) for _ in range(3)]
    assert results == [[False, False, True], [True, False, True], [True, True, True]]


def test_the_more_lengths_are_looked_up_the_fewer_tokens_of_a_prompt_a_step_takes_in() -> None:
    """Each token ends a run of each length, so that a step costs about the same with all lengths from 1 to 64."""
    weights = []
    for max_len in (1, 64):
        drafter = NgramDrafter(NgramSettings(2, min_len=1, max_len=max_len))
        drafter.propose([make_sequence(list(range(5000)))])
        weights.append(drafter.weight)
    assert weights[1] <= weights[0]


def test_what_has_ended_is_forgotten() -> None:
    drafter, seq = make_drafter(), make_sequence([1, 2] * 5)
    drafter.propose([seq])
    assert drafter.weight > 0
    drafter.leave(seq)
    drafter.leave(seq)
    assert drafter.weight == 0


def test_what_a_long_prompt_leaves_is_dropped_over_several_steps() -> None:
    """No step drops more entries than a part of an index has, and all are gone before as many could have come."""
    drafter = make_drafter()
    long, other = make_sequence(list(range(30_000))), make_sequence([1, 2] * 20)
    num_steps = 30_000 * 2 // ngram_drafter.MAX_INDEXED_RUNS + 1
    for _ in range(num_steps):
        drafter.propose([other, long])
    weights = [drafter.weight]
    drafter.leave(long)
    for _ in range(num_steps):
        weights.append(drafter.weight)
        drafter.propose([other])
    dropped = [before - after for before, after in pairwise(weights)]
    assert 0 < max(dropped) <= ngram_drafter.ENTRY_WEIGHT * (MAX_PART_ENTRIES + ngram_drafter.MAX_INDEXED_RUNS)
    drafter.leave(other)
    assert drafter.weight == 0


@pytest.mark.alone
def test_a_step_costs_a_sequence_no_more_than_some_appends() -> None:
    """256 sequences of which each gets a token; the machine's speed is taken out by what a bare loop takes."""
    drafter = make_drafter()
    batch = [make_sequence([number * 1000 + place for place in range(100)]) for number in range(256)]
    for _ in range(256 * 100 * 2 // ngram_drafter.MAX_INDEXED_RUNS + 1):
        drafter.propose(batch)
    ratios, seconds = [], []
    for step in range(30):
        started_s = thread_time()
        for seq in batch:
            seq.token_ids.append(step)
            tuple(seq.token_ids[-3:])
        middle_s = thread_time()
        drafter.propose(batch)
        seconds.append(thread_time() - middle_s)
        ratios.append(seconds[-1] / (middle_s - started_s))
    print(f"{min(seconds) / len(batch) * 1e6:.1f} us a row")
    assert min(ratios) < MAX_RATIO, ratios
