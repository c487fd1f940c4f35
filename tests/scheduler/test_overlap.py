"""One step ahead: what is in flight keeps its pages, and the token too many is dropped (B27)."""

import pytest
from doubles_scheduler import StepLoop, make_limits, make_request, run_alone, run_every_interleaving

from aserve.scheduler.plan import StepTokens


def pages_of(loop: StepLoop, request_id: str) -> set[int]:
    return set(loop.scheduler._sequences[request_id].pages)


def eos_after(num_tokens: int, prompt: list[int]) -> frozenset[int]:
    """Return an EOS that the double's model first picks as output token ``num_tokens`` of ``prompt``."""
    request = make_request("x", prompt, max_tokens=num_tokens)
    token_ids = run_alone(request, make_limits(), frozenset()).token_ids
    assert token_ids.index(token_ids[-1]) == num_tokens - 1
    return frozenset(token_ids[-1:])


def test_eos_with_the_next_step_in_flight() -> None:
    prompt = [1, 2, 3]
    loop = StepLoop(make_limits(), eos_token_ids=eos_after(3, prompt), prefix_cache=False)
    outcome = loop.add(make_request("r", prompt, ignore_eos=False))
    loop.launch()
    loop.launch()
    loop.commit()
    loop.launch()  # samples the third token
    loop.commit()
    held = pages_of(loop, "r")
    assert loop.launch() is not None  # the step too many
    loop.commit()  # the third token: EOS
    assert outcome.finish_reason == "stop"
    assert not loop.scheduler.has_unfinished
    assert loop.scheduler.num_in_flight == 1
    assert not held & loop.free_pages.free_pages(), "pages were freed under a step in flight"
    other = loop.add(make_request("other", [4, 5, 6]))
    plan = loop.launch()  # must take another row and other pages
    assert not {page for _, _, page in plan.page_updates} & held
    assert plan.rows != loop.plans[0].rows
    loop.commit()
    assert held <= loop.free_pages.free_pages()
    loop.run()
    loop.check_outcomes()
    assert len(outcome.token_ids) == 3
    assert len(other.token_ids) == 8


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_no_step_is_spent_on_a_token_past_a_known_end(depth: int, max_tokens: int) -> None:
    loop = StepLoop(make_limits(), depth=depth)
    loop.add(make_request("r", range(5), max_tokens=max_tokens))
    loop.add(make_request("context", range(20, 25), max_tokens=None))
    loop.run()
    loop.check_outcomes()
    assert sum(plan.rows.count(loop.plans[0].rows[0]) for plan in loop.plans[:max_tokens]) == max_tokens
    assert len(loop.plans) == 200 - 5  # max_model_len; the last token is not computed


def test_the_same_tokens_at_every_depth() -> None:
    results = []
    for depth in range(4):
        loop = StepLoop(make_limits(num_pages=30), depth=depth, eos_token_ids=frozenset({7}))
        for number in range(12):
            loop.add(make_request(f"r{number}", range(number, 20), ignore_eos=False, max_tokens=30, seed=number))
        loop.run()
        loop.check_outcomes()
        results.append([outcome.token_ids for outcome in loop.outcomes.values()])
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("num_actions", range(12))
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_abort_at_each_point_of_the_pipeline(num_actions: int, depth: int) -> None:
    """The double spoils freed pages, so a page given back too early is read as spoilt; freeing twice raises."""
    loop = StepLoop(make_limits(max_num_batched_tokens=8), depth=depth)
    loop.add(make_request("victim", range(20), max_tokens=4))  # 3 chunks, then decodes
    loop.add(make_request("other", range(20, 32), max_tokens=12))
    for number in range(num_actions):
        if number % 2 == 0:
            loop.launch()
        elif len(loop.device.pending) > depth:
            loop.commit()
    assert loop.abort("victim")
    loop.run()
    loop.check_outcomes()
    assert len(loop.outcomes["other"].token_ids) == 12


def test_abort_and_eos_in_the_same_step() -> None:
    prompt = [1, 2, 3]
    for abort_first in (True, False):
        loop = StepLoop(make_limits(), eos_token_ids=eos_after(3, prompt))
        outcome = loop.add(make_request("r", prompt, ignore_eos=False))
        for _ in range(3):
            loop.turn()  # the third token, EOS, is in flight
        if abort_first:
            assert loop.abort("r")
            loop.commit()
            assert outcome.num_deltas == 2
        else:
            loop.commit()
            assert outcome.finish_reason == "stop"
            assert not loop.abort("r")
        loop.run()


def test_an_id_may_return_while_its_aborted_namesake_is_in_flight() -> None:
    loop = StepLoop(make_limits())
    loop.add(make_request("r", range(9)))
    loop.launch()
    loop.abort("r")
    outcome = loop.add(make_request("r", range(30, 37)))
    loop.run()
    loop.check_outcomes()
    assert len(outcome.token_ids) == 8


def test_commit_refuses_a_step_out_of_order() -> None:
    loop = StepLoop(make_limits())
    loop.add(make_request("r", range(5)))
    loop.launch()
    loop.launch()
    loop.device.complete()
    with pytest.raises(ValueError, match="step 1 must be committed next"):
        loop.scheduler.commit(loop.device.complete())


def test_commit_refuses_a_step_that_was_never_planned() -> None:
    with pytest.raises(ValueError, match="no plan is in flight"):
        StepLoop(make_limits()).scheduler.commit(StepTokens(1, []))


def test_every_interleaving_of_a_short_run() -> None:
    """Of two requests that share a prompt."""

    def two_requests() -> StepLoop:
        loop = StepLoop(make_limits(num_pages=6, max_num_seqs=2, max_num_batched_tokens=6))
        loop.add(make_request("a", range(8), max_tokens=3))
        loop.add(make_request("b", range(8), max_tokens=5))
        return loop

    run_every_interleaving(two_requests)
