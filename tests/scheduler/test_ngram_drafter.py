"""Drafts from a sequence's own text: what stood there before, how many, and when none are made."""

from time import thread_time

import pytest
from doubles_scheduler import make_request

from aserve.cache.radix_tree import RadixTree
from aserve.scheduler import ngram_drafter
from aserve.scheduler.ngram_drafter import MAX_REST, NgramDrafter, NgramSettings
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


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 1, 2], [3, 4, 5, 6]),  # two tokens that stood there before
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3, 8]),  # three tell more than two that are nearer
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the nearest of equals, and the text goes round
        ([1, 2, 3, 4, 5], []),
        ([7, 7, 7], [7, 7, 7, 7]),
        ([7], []),
    ],
)
def test_drafts_are_what_followed_the_same_tokens(token_ids: list[int], expected: list[int]) -> None:
    assert make_drafter().propose([make_sequence(token_ids)]) == [expected]


@pytest.mark.parametrize(("num_pending", "expected"), [(0, [3, 4, 5, 6]), (1, [4, 5, 6, 9]), (2, [5, 6, 9, 1])])
def test_tokens_in_flight_are_taken_to_be_what_was_found_for_them(num_pending: int, expected: list[int]) -> None:
    seq = make_sequence([1, 2, 3, 4, 5, 6, 9, 1, 2], num_pending)
    assert make_drafter().propose([seq]) == [expected]


def test_a_draft_is_as_long_as_the_last_one_was_good() -> None:
    drafter, seq = make_drafter(num_tokens=6), make_sequence([1, 2] * 10)
    lens = []
    for num_accepted in (6, 1, 0, 1, 2):
        drafter.propose([seq])
        drafter.learn(seq, num_accepted)
        seq.token_ids += [1, 2] * MAX_REST  # past any rest
        seq.num_computed = len(seq.token_ids) - 1
        (drafts,) = drafter.propose([seq])
        lens.append(len(drafts))
    assert lens == [6, 3, 1, 3, 5]


def test_after_wrong_drafts_a_sequence_rests_longer_each_time_until_one_is_right() -> None:
    drafter, seq = make_drafter(), make_sequence([5] * 10)
    rests = []
    for num_accepted in (0, 0, 0, 0, 0, 1, 0):
        drafter.propose([seq])
        seq.token_ids.append(5)
        seq.num_computed += 1
        drafter.learn(seq, num_accepted)
        num_without = 0
        while not drafter.propose([seq])[0]:
            num_without += 1
            seq.token_ids.append(5)
            seq.num_computed += 1
        rests.append(num_without)
    assert rests == [1, 3, 7, MAX_REST, MAX_REST, 0, 1]


def test_long_prompts_take_several_steps_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_drafter, "MAX_INDEXED_TOKENS", 100)
    drafter = make_drafter()
    long, other, short = make_sequence([1, 2] * 75), make_sequence([3, 4] * 75), make_sequence([5, 6, 5, 6])
    results = [[bool(drafts) for drafts in drafter.propose([long, other, short])] for _ in range(3)]
    assert results == [[False, False, True], [True, False, True], [True, True, True]]


def test_what_has_ended_is_forgotten() -> None:
    drafter, seq = make_drafter(), make_sequence([1, 2] * 5)
    drafter.propose([seq])
    assert drafter.weight > 0
    drafter.leave(seq)
    drafter.leave(seq)
    assert drafter.weight == 0


@pytest.mark.alone
def test_a_step_costs_a_sequence_no_more_than_some_appends() -> None:
    """256 sequences of which each gets a token; the machine's speed is taken out by what a bare loop takes."""
    drafter = make_drafter()
    batch = [make_sequence([number * 1000 + place for place in range(100)]) for number in range(256)]
    for _ in range(256 * 100 // ngram_drafter.MAX_INDEXED_TOKENS + 1):
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
