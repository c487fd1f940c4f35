"""Drafts: a step verifies several tokens of a row, and what it rejects leaves no trace."""

import dataclasses
import math

import pytest
from doubles_scheduler import StepLoop, make_limits, make_request, run_alone, run_every_interleaving

from aserve.request import GrammarSpec, SamplingParams
from aserve.scheduler.drafter import Draft, Drafter, can_verify
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import StepPlan
from aserve.scheduler.sequence import Sequence

PROMPT = [1, 2, 3, 4, 5]
EOS_FREE = frozenset[int]()
WRONG = 49  # never what the double's model picks for these prompts; checked where it matters


class PlannedDrafter(Drafter):
    """Proposes the right tokens and then wrong ones, as many of each as it is told, for one step after the other.

    It expects enough of all of them that they are verified.
    """

    def __init__(self, limits: Limits, *steps: tuple[int, int]) -> None:
        self.limits = limits
        self.steps = list(steps)

    def propose(self, batch: list[Sequence]) -> list[Draft | None]:
        num_right, num_wrong = self.steps.pop(0) if batch and self.steps else (0, 0)
        if not num_right + num_wrong:
            return [None] * len(batch)
        return [Draft(right_tokens(seq, self.limits, num_right) + [WRONG] * num_wrong, math.inf) for seq in batch]


def right_tokens(seq: Sequence, limits: Limits, count: int) -> list[int]:
    """Return what the model will pick after all that is known or in flight."""
    history = [*seq.request.prompt_token_ids, *run_alone(seq.request, limits, EOS_FREE).token_ids]
    first = seq.num_computed + 1
    return history[first : first + count]


def make_loop(*steps: tuple[int, int], depth: int = 0, lease_fraction: float = 0.0, **changes: float) -> StepLoop:
    limits = make_limits(**changes)
    return StepLoop(limits, depth=depth, drafter=PlannedDrafter(limits, *steps), lease_fraction=lease_fraction)


@pytest.mark.parametrize(("num_right", "num_wrong"), [(4, 0), (2, 2), (0, 3), (2, 0), (0, 2)])
def test_a_row_gets_as_many_tokens_as_drafts_are_right_and_one_more(num_right: int, num_wrong: int) -> None:
    loop = make_loop((0, 0), (num_right, num_wrong))
    outcome = loop.add(make_request("r", PROMPT, max_tokens=12))
    for _ in range(3):
        loop.turn()
    plan = loop.plans[2]
    assert (plan.num_decodes, plan.num_computed, plan.num_scheduled) == (0, [6], [1 + num_right + num_wrong])
    assert (plan.num_chunks, plan.num_sampled, plan.is_decode) == (0, 1 + num_right + num_wrong, False)
    assert len(outcome.token_ids) == 2 + num_right + 1
    assert outcome.num_deltas == 3
    assert loop.launch().num_computed == [6 + num_right + 1]
    loop.run()
    loop.check_outcomes()
    stats = loop.scheduler.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (num_right + num_wrong, num_right)


def test_drafts_follow_the_token_in_flight_and_the_row_waits_for_them_while_others_go_on() -> None:
    loop = make_loop((0, 0), (3, 1), depth=1)
    first = loop.add(make_request("first", PROMPT, max_tokens=20, seed=1))
    other = loop.add(make_request("other", [7, 8], max_tokens=20, seed=2, presence_penalty=0.5))  # never has drafts
    for _ in range(3):
        loop.launch()  # the prompts, a decode of both, drafts of the first while its token is in flight
        if len(loop.device.pending) > 1:
            loop.commit()
    row, other_row = loop.plans[0].rows
    plan = loop.plans[2]
    assert (plan.rows, plan.num_decodes) == ([other_row, row], 1)
    assert plan.num_computed == [2 + 1, 5 + 1]
    assert plan.drafts == [[*run_alone(first.request, loop.limits, EOS_FREE).token_ids[2:5], WRONG]]
    following = loop.launch()
    assert following.rows == [other_row], "the other row does not wait"
    loop.commit()  # the decode that was in flight
    loop.commit()  # the drafts
    assert len(first.token_ids) == 2 + 3 + 1
    plan = loop.launch()
    assert sorted(plan.rows) == sorted([row, other_row])
    assert plan.num_computed[plan.rows.index(row)] == 5 + 1 + 3 + 1
    loop.run()
    loop.check_outcomes()
    assert len(other.token_ids) == 20


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_draft_reaches_beyond_the_end(depth: int) -> None:
    for max_tokens in range(1, 9):
        loop = make_loop(*[(6, 0)] * 20, depth=depth)
        outcome = loop.add(make_request("r", PROMPT, max_tokens=max_tokens))
        loop.run()
        loop.check_outcomes()
        assert len(outcome.token_ids) == max_tokens
        assert max(map(end_of, loop.plans)) == len(PROMPT) + max_tokens - 1, "the last token is not computed"


def end_of(plan: StepPlan) -> int:
    return max(computed + scheduled for computed, scheduled in zip(plan.num_computed, plan.num_scheduled, strict=True))


def test_a_stop_token_among_right_drafts_ends_the_request() -> None:
    request = make_request("r", PROMPT, max_tokens=20)
    tokens = run_alone(request, make_limits(), EOS_FREE).token_ids
    stop = next(token for token in tokens[2:6] if tokens.index(token) >= 2)
    loop = make_loop((0, 0), (6, 0))
    outcome = loop.add(make_request("r", PROMPT, max_tokens=20, stop_token_ids=(stop,)))
    loop.scheduler._drafter.propose = lambda batch: [
        Draft(tokens[seq.num_computed - 4 :][:6], math.inf) for seq in batch
    ]
    loop.run()
    assert (outcome.finish_reason, outcome.stop_token_id) == ("stop", stop)
    assert outcome.token_ids == tokens[: tokens.index(stop) + 1]
    loop.check_outcomes()


def test_what_was_rejected_is_never_found_by_another_request() -> None:
    loop = make_loop((0, 0), (1, 6), page_size=1)
    first = loop.add(make_request("first", PROMPT, max_tokens=4))
    loop.run()
    known = [*PROMPT, *first.token_ids]
    rejected = [*known[: len(PROMPT) + 3], WRONG, WRONG, WRONG]
    found = loop.add(make_request("found", [*known, 7], max_tokens=2))
    missed = loop.add(make_request("missed", rejected, max_tokens=2))
    loop.run()
    loop.check_outcomes()
    assert found.num_cached_tokens == len(known) - 1, "its last token was not computed"
    assert missed.num_cached_tokens == len(PROMPT) + 3


def test_an_error_after_right_drafts_comes_after_their_tokens() -> None:
    limits = make_limits()
    for seed in range(200):
        request = make_request("r", PROMPT, max_tokens=30, min_p=0.1, seed=seed)
        reference = run_alone(request, limits, EOS_FREE)
        if reference.error and 4 <= len(reference.token_ids) <= 7:
            break
    loop = make_loop((0, 0), (6, 0))
    outcome = loop.add(request)
    loop.run()
    loop.check_outcomes()
    assert outcome.error is not None
    assert outcome.num_deltas == 4, "two, those of the drafts, and the error"


@pytest.mark.parametrize("num_pages", range(6, 14))
def test_drafts_take_no_page_that_makes_another_give_way(num_pages: int) -> None:
    """Two sequences that just fit: with drafts at every step, none is preempted who would not be without."""
    counts = []
    for steps in ([], [(6, 0)] * 60):
        loop = make_loop(*steps, num_pages=num_pages, page_size=4, max_model_len=40)
        for number in range(2):
            loop.add(make_request(f"r{number}", range(number, number + 8), max_tokens=8, seed=number))
        loop.run()
        loop.check_outcomes()
        counts.append(loop.scheduler.stats().num_preemptions)
    assert counts[1] <= counts[0]


def test_drafts_leave_leases_alone() -> None:
    """Five of eight pages are free: the sixth comes from the lease, but only for the token that needs it."""
    loop = make_loop(*[(0, 0)] * 3, *[(1, 2)] * 20, num_pages=8, page_size=4, lease_fraction=1.0)
    loop.add(dataclasses.replace(make_request("leased", range(15), max_tokens=1), lease="socket"))
    while loop.is_busy:
        loop.turn()
    loop.add(make_request("r", range(20, 32), max_tokens=18))
    needed_at = []
    while loop.is_busy:
        num_leased = loop.scheduler.stats().num_leased_pages
        plan = loop.turn()
        if loop.scheduler.stats().num_leased_pages < num_leased == 3:
            needed_at = plan.num_computed
    assert needed_at == [20]
    assert any(17 <= plan.num_computed[0] < 20 for plan in loop.plans), "drafts would have needed it before"


def test_prompts_get_their_turn_beside_rows_that_verify() -> None:
    """Rows that verify share the places of chunks with prompts."""
    loop = make_loop(*[(6, 0)] * 500, max_num_chunks=2, depth=1)
    for number in range(4):
        loop.add(make_request(f"r{number}", [number], max_tokens=60, seed=number))
    for _ in range(12):
        loop.turn()
    late = loop.add(make_request("late", range(10, 30), max_tokens=1))
    for _ in range(30):
        loop.turn()
    assert late.finish_reason == "length"
    loop.run()
    loop.check_outcomes()


@pytest.mark.parametrize(
    ("max_num_drafts", "expected"),
    [
        (8, [6, 2]),
        (7, [6]),  # a single token brings at most the step that its row misses
    ],
)
def test_a_step_has_no_more_drafts_than_the_device_takes(max_num_drafts: int, expected: list[int]) -> None:
    plans = run_six((6, 0), max_num_drafts=max_num_drafts)
    assert max(sum(map(len, plan.drafts)) for plan in plans) <= max_num_drafts
    assert list(map(len, next(plan.drafts for plan in plans if plan.drafts))) == expected


def test_drafts_leave_half_of_the_chunks_to_prompts() -> None:
    assert max(len(plan.drafts) for plan in run_six((2, 0), max_num_chunks=6)) == 3


def run_six(step: tuple[int, int], **changes: float) -> list[StepPlan]:
    """Return the steps of six requests with the same drafts for each."""
    loop = make_loop(*[step] * 50, **changes)
    for number in range(6):
        loop.add(make_request(f"r{number}", [number, 3], max_tokens=30, seed=number))
    loop.run()
    loop.check_outcomes()
    return loop.plans


def test_what_does_not_pay_takes_no_room_from_drafts_behind_it() -> None:
    loop = make_loop(max_num_drafts=6)
    expected = [4.0, 3.0, 1.0, 2.0]  # of four, four, four and two tokens
    lens = [4, 4, 4, 2]
    loop.scheduler._drafter.propose = lambda batch: [
        Draft([WRONG] * count, number) for number, count in zip(expected, lens, strict=True) if batch
    ]
    for number in range(4):
        loop.add(make_request(f"r{number}", [number, 3], max_tokens=30, seed=number))
    loop.turn()
    plan = loop.turn()
    assert [len(drafts) for drafts in plan.drafts] == [4, 2]


@pytest.mark.parametrize(("max_tokens", "num_drafts"), [(2, []), (3, []), (4, [2]), (5, [3])])
def test_a_draft_is_judged_by_what_the_end_of_its_request_leaves_of_it(max_tokens: int, num_drafts: list[int]) -> None:
    """Two tokens, the prompt's and the last, are sampled without; a single draft between them brings nothing."""
    loop = make_loop(*[(6, 0)] * 20)
    loop.add(make_request("r", PROMPT, max_tokens=max_tokens))
    loop.run()
    loop.check_outcomes()
    assert [len(drafts) for plan in loop.plans for drafts in plan.drafts] == num_drafts


@pytest.mark.parametrize(("prompt_len", "num_drafts"), [(4, [3]), (5, [2]), (6, []), (7, [])])
def test_a_draft_is_judged_by_what_the_pages_leave_of_it(prompt_len: int, num_drafts: list[int]) -> None:
    """Two requests with two pages of four tokens each are all that there is."""
    loop = make_loop((6, 0), num_pages=4, page_size=4)
    loop.add(make_request("r", range(prompt_len), max_tokens=8))
    loop.add(make_request("other", range(20, 27), max_tokens=8, presence_penalty=0.5))  # never has drafts
    loop.turn()
    plan = loop.turn()
    assert [len(drafts) for drafts in plan.drafts] == num_drafts


def test_drafts_that_do_not_pay_get_no_pages() -> None:
    loop = make_loop(page_size=1)
    loop.scheduler._drafter.propose = lambda batch: [Draft([WRONG] * 6, 1.25) for _ in batch]
    loop.add(make_request("r", PROMPT, max_tokens=12))
    loop.turn()
    num_available = loop.scheduler._memory.cache.num_available
    assert loop.turn().drafts == []
    assert loop.scheduler._memory.cache.num_available == num_available - 1, "that of the token"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}, True),
        ({"logprobs": 3, "prompt_logprobs": 1, "logit_bias": {3: 1.0}, "min_tokens": 4, "stop": "x"}, True),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"grammar": GrammarSpec("regex", "a+")}, False),
    ],
)
def test_rows_whose_samples_depend_on_what_was_sampled_have_no_drafts(changes: dict, expected: bool) -> None:
    assert can_verify(SamplingParams(**changes)) is expected


def test_every_interleaving_of_a_short_run_with_drafts() -> None:
    """Of two requests that share a prompt."""

    def two_requests() -> StepLoop:
        loop = make_loop(*[(2, 1), (0, 2)] * 10, num_pages=10, max_num_seqs=2, max_num_batched_tokens=12)
        loop.add(make_request("a", range(8), max_tokens=6))
        loop.add(make_request("b", range(8), max_tokens=9))
        return loop

    run_every_interleaving(two_requests)
