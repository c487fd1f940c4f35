"""Conversations whose pages are leased: the next turn finds them, whatever ran in between, and nothing leaks."""

import dataclasses
import random

from doubles_scheduler import StepLoop

from aserve.request import Request, SamplingParams
from aserve.scheduler.limits import Limits


def limits(num_pages: int = 40, page_size: int = 4) -> Limits:
    return Limits(
        vocab_size=12,
        max_model_len=80,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        num_pages=num_pages,
        page_size=page_size,
    )


def request(name: str, prompt: list[int], lease: str | None = None, **params: object) -> Request:
    sampling = SamplingParams(**{"max_tokens": 4, "seed": 1, **params})
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=sampling, lease=lease)


def run(loop: StepLoop, one: Request) -> list[int]:
    """Run ``one`` alone to its end; return its prompt and output."""
    outcome = loop.add(one)
    while loop.is_busy:
        loop.turn()
    return [*one.prompt_token_ids, *outcome.token_ids]


def test_a_leased_conversation_survives_what_evicts_all_else() -> None:
    loop = StepLoop(limits(), lease_fraction=0.5)
    spoken = run(loop, request("first", list(range(11)) * 2, "lane"))
    for number in range(30):
        run(loop, request(f"other {number}", [(number * 7 + place * 5) % 12 for place in range(50)]))
    assert loop.scheduler.stats().num_leased_pages == (len(spoken) - 1) // 4
    outcome = loop.add(request("second", [*spoken, 1, 2, 3], "lane"))
    while loop.is_busy:
        loop.turn()
    # All but what follows the last full page of what was computed.
    assert outcome.num_cached_tokens == (len(spoken) - 1) // 4 * 4
    loop.scheduler.end_lease("lane")
    loop.check_idle()
    loop.check_outcomes()


def test_a_turn_that_comes_at_once_finds_the_one_that_was_just_aborted() -> None:
    loop = StepLoop(limits(), depth=1)
    first = loop.add(request("first", [1] * 18, "lane", max_tokens=40, min_tokens=40))
    while len(first.token_ids) < 9:
        loop.turn()
    assert loop.device.pending, "a step that still contains it is on its way"
    spoken = [1] * 18 + first.token_ids
    loop.abort("first")
    second = loop.add(request("second", [*spoken, 3], "lane"))
    loop.run()
    assert second.num_cached_tokens == (len(spoken) - 1) // 4 * 4
    loop.scheduler.end_lease("lane")
    loop.check_idle()
    loop.check_outcomes()


def test_a_turn_that_comes_at_once_finds_the_one_that_has_just_ended() -> None:
    loop = StepLoop(limits(), depth=1)
    first = loop.add(request("first", [1] * 18, max_tokens=6, stop_token_ids=list(range(12)), min_tokens=4))
    while first.finish_reason is None:
        loop.turn()
    assert loop.device.pending, "a step that still contains it is on its way"
    spoken = [1] * 18 + first.token_ids
    second = loop.add(request("second", [*spoken, 3]))
    loop.run()
    assert second.num_cached_tokens == (len(spoken) - 1) // 4 * 4
    loop.check_outcomes()


def test_leases_give_way_to_a_request_that_needs_the_pool() -> None:
    loop = StepLoop(limits(num_pages=20), lease_fraction=1.0)
    for number in range(3):
        run(loop, request(f"r{number}", [number] * 21, f"lane{number}"))
    assert loop.scheduler.stats().num_leased_pages == 18
    run(loop, request("large", list(range(12)) * 6))
    loop.check_outcomes()
    for number in range(3):
        loop.scheduler.end_lease(f"lane{number}")
    loop.check_idle()


def test_a_closed_holder_gets_no_lease_from_what_ends_late() -> None:
    loop = StepLoop(limits(), lease_fraction=0.5)
    loop.add(request("r", [1] * 20, "lane", max_tokens=20))
    for _ in range(4):
        loop.turn()
    loop.scheduler.end_lease("lane")
    loop.abort("r")
    while loop.is_busy:
        loop.turn()
    loop.check_idle()


def play(seed: int) -> int:
    """Let lanes take turns, fork, abort and close at random in a tiny pool; return how many tokens were found."""
    rng = random.Random(seed)
    loop = StepLoop(
        limits(rng.choice((24, 30, 40)), rng.choice((1, 2, 4))),
        depth=rng.choice((0, 1, 2)),
        lease_fraction=rng.choice((0.2, 0.5, 1.0)),
    )
    pool = loop.limits.num_pages * loop.limits.page_size
    latest: dict[str, tuple[str, tuple[int, ...]]] = {}  # lane -> id and prompt of its newest request
    for number in range(40):
        lane = rng.choice("abcd")
        name, prompt = latest.get(rng.choice((lane, "a")), ("", ()))
        if name:
            prompt = (*prompt, *loop.outcomes[name].token_ids)
        prompt = (*prompt, *(rng.randrange(12) for _ in range(rng.randrange(1, 6))))
        prompt = prompt if len(prompt) < min(pool, 80) - 12 else prompt[:3]
        new = request(f"r{number}", list(prompt), lane, max_tokens=rng.randrange(1, 9), ignore_eos=True)
        loop.add(dataclasses.replace(new, priority=rng.choice((0, 1))))
        latest[lane] = (new.request_id, prompt)
        for _ in range(rng.randrange(8)):
            loop.turn()
        if rng.random() < 0.15:
            loop.abort(new.request_id)
        if rng.random() < 0.1:
            loop.scheduler.end_lease(lane)
    for _ in range(2000):
        if not loop.is_busy:
            break
        loop.turn()
    assert not loop.is_busy
    for lane in "abcd":
        loop.scheduler.end_lease(lane)
    loop.check_idle()
    loop.check_outcomes()
    return loop.scheduler.stats().num_prefix_tokens_hit


def test_random_schedules_with_leases() -> None:
    assert sum(play(seed) for seed in range(150)) > 1000
