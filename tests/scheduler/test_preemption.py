"""Too few pages: who gives way, what is kept, and that it always ends (B24, B25)."""

import random
from itertools import pairwise

import pytest
from doubles_scheduler import StepLoop, make_limits, make_request

from aserve.errors import ClientError


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_64_requests_in_a_pool_too_small_equal_each_alone(chunk: int, page_size: int, prefix_cache: bool) -> None:
    """B24: shared and distinct prefixes, lengths around whole pages; the double notices reads of unwritten slots."""
    rng = random.Random(chunk)
    limits = make_limits(
        num_pages=208 // page_size, page_size=page_size, max_num_batched_tokens=chunk, max_model_len=96, max_num_seqs=12
    )
    loop = StepLoop(limits, prefix_cache=prefix_cache, eos_token_ids=frozenset({9}))
    shared = [rng.randrange(50) for _ in range(40)]
    for number in range(64):
        own = [rng.randrange(50) for _ in range(40)]
        length = 16 * rng.choice((1, 2)) + rng.choice((-1, 0, 1))
        prompt = (shared[:length] if number % 2 else own[:length]) + own[: rng.randrange(3)]
        loop.add(
            make_request(f"r{number}", prompt, max_tokens=rng.choice((15, 16, 17, 33)), seed=number, ignore_eos=False)
        )
    loop.run()
    loop.check_outcomes()
    assert chunk == 1 or loop.scheduler.stats().num_preemptions > 0


def make_pool_of_1024() -> StepLoop:
    return StepLoop(make_limits(num_pages=64, page_size=16, max_model_len=8192, max_num_batched_tokens=256))


def test_what_can_never_fit_is_refused_and_others_are_served() -> None:
    loop = make_pool_of_1024()
    loop.add(make_request("small", range(20)))
    with pytest.raises(ClientError, match="1024 tokens"):
        loop.add(make_request("big", [1] * 1100))
    loop.run()
    loop.check_outcomes()


def test_a_request_that_outgrows_the_pool_alone_ends_by_length() -> None:
    loop = make_pool_of_1024()
    outcome = loop.add(make_request("r", [number % 50 for number in range(900)], max_tokens=4000))
    loop.run()
    loop.check_outcomes()
    assert outcome.finish_reason == "length"
    assert len(outcome.token_ids) == 1024 + 1 - 900  # the last token needs no slot
    assert loop.scheduler.stats().num_preemptions == 0


def test_eight_requests_of_which_two_fit_all_end() -> None:
    loop = make_pool_of_1024()
    rng = random.Random(8)
    for number in range(8):
        loop.add(make_request(f"r{number}", [rng.randrange(50) for _ in range(500)], max_tokens=400))
    num_turns_without = 0
    while loop.is_busy:
        num_tokens = sum(len(outcome.token_ids) for outcome in loop.outcomes.values())
        plan = loop.turn()
        num_tokens -= sum(len(outcome.token_ids) for outcome in loop.outcomes.values())
        has_chunk = plan is not None and len(plan.rows) > plan.num_decodes
        num_turns_without = 0 if num_tokens or has_chunk else num_turns_without + 1
        assert num_turns_without < 5
    loop.check_outcomes()
    loop.check_idle()
    # 8 x 900 tokens; whatever is computed more was lost to preemption
    num_computed = sum(plan.num_tokens for plan in loop.plans)
    assert num_computed < 2 * 8 * 900


def test_the_latest_gives_way_and_loses_nothing() -> None:
    """With one step in flight: the missing page is first waited for, then the token in flight is kept."""
    loop = StepLoop(make_limits(num_pages=6, page_size=4, max_model_len=24), prefix_cache=False)
    loop.add(make_request("old", range(7), max_tokens=17))
    loop.add(make_request("new", range(10, 17), max_tokens=17))
    num_none = 0
    while not loop.scheduler.stats().num_preemptions:
        tokens_before = [len(outcome.token_ids) for outcome in loop.outcomes.values()]
        num_none += loop.turn() is None
    assert num_none >= 1, "a sequence was preempted with a step in flight"
    assert [len(outcome.token_ids) for outcome in loop.outcomes.values()] >= tokens_before
    assert loop.scheduler.num_waiting == 1
    preempted_at = len(loop.outcomes["new"].token_ids)
    assert preempted_at > 1
    loop.run()
    loop.check_outcomes()
    restart = [start for plan in loop.plans[1:] for start in plan.row_starts]
    assert len(restart) == 1
    assert restart[0].prompt_len == 7
    assert restart[0].seed == 5
    assert restart[0].token_ids == [*range(10, 17), *loop.outcomes["new"].token_ids[:preempted_at]]


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    loop = StepLoop(make_limits(num_pages=8, page_size=4, max_model_len=32))
    loop.add(make_request("old", range(7), max_tokens=14))
    new = loop.add(make_request("new", range(10, 23), max_tokens=17))
    loop.run()
    loop.check_outcomes()
    assert loop.scheduler.stats().num_preemptions == 1
    assert loop.scheduler.stats().num_prefix_tokens_hit > 0
    assert new.num_cached_tokens == 0  # of its first start, not of its second


def test_priority_decides_who_gives_way() -> None:
    for policy, victim in (("priority", "urgent last"), ("fcfs", "urgent last")):
        loop = StepLoop(make_limits(num_pages=6, page_size=4, max_model_len=24), policy=policy)
        loop.add(make_request("idle first", range(7), max_tokens=17, priority=9))
        loop.add(make_request("urgent last", range(10, 17), max_tokens=17, priority=1))
        loop.run()
        loop.check_outcomes()
        restarted = [start.request_id for plan in loop.plans[1:] for start in plan.row_starts]
        assert restarted == [victim if policy == "fcfs" else "idle first"]


def test_a_preempted_scoring_request_reports_every_position_once() -> None:
    loop = StepLoop(make_limits(num_pages=24, page_size=4, max_model_len=90, max_num_batched_tokens=4))
    loop.add(make_request("old", range(20), max_tokens=60))
    loop.add(make_request("scored", range(48), prompt_logprobs=0, max_tokens=20))
    loop.run()
    loop.check_outcomes()
    assert loop.scheduler.stats().num_preemptions >= 1


def test_decodes_without_pages_wait_only_while_steps_are_in_flight() -> None:
    loop = StepLoop(make_limits(num_pages=3, page_size=4, max_model_len=12), depth=2)
    for number in range(3):
        loop.add(make_request(f"r{number}", range(number, number + 3), max_tokens=9))
    results = []
    while loop.is_busy:
        is_in_flight = bool(loop.device.pending)
        results.append((loop.turn() is None, is_in_flight))
    assert all(is_in_flight for is_none, is_in_flight in results if is_none)
    assert all(later.step_id == earlier.step_id + 1 for earlier, later in pairwise(loop.plans))
    loop.check_outcomes()
