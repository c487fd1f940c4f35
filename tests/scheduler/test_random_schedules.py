"""10,000 random schedules against each request run alone: aborts, tiny pools, overlap, preemption, shared prompts.

Half of them verify drafts.
"""

import random
from collections import Counter

import pytest
from doubles_scheduler import GuessingDrafter, StepLoop

from aserve.request import Request, SamplingParams
from aserve.scheduler.limits import Limits

VOCAB = 12
EOS = frozenset({11})


def make_limits(rng: random.Random) -> Limits:
    page_size = rng.choice((1, 1, 2, 3, 4, 8))
    return Limits(
        vocab_size=VOCAB,
        max_model_len=rng.choice((12, 20, 40)),
        max_num_seqs=rng.choice((1, 3, 8, 8, 8)),
        max_num_batched_tokens=rng.choice((1, 3, 8, 16, 64, 64)),
        num_pages=max(2, rng.choice((12, 24, 32, 64)) // page_size),
        page_size=page_size,
        max_num_chunks=rng.choice((None, None, None, 2, 5)),
        max_num_drafts=rng.choice((None, None, 4)),
        context_cost=rng.choice((0.0, 0.0, 0.0, 0.05, 0.3)),
    )


def make_request(rng: random.Random, limits: Limits, number: int, prompts: list[tuple[int, ...]]) -> Request:
    max_tokens = rng.choice((None, 0, 1, 2, 5, 9, 12, 20))
    longest = min(limits.max_model_len, limits.num_pages * limits.page_size) - (max_tokens != 0)
    if prompts and rng.random() < 0.5:
        prompt = rng.choice(prompts)
        prompt = (prompt[: rng.randint(1, len(prompt))] if rng.random() < 0.4 else prompt) + tuple(
            rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 0, 1, 3)))
        )
        prompt = prompt[:longest]
    else:
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, rng.choice((4, 6, 8, longest)))))[:longest]
    prompts.append(prompt)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, 2)),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=(3,) if rng.random() < 0.1 else (),
        seed=rng.choice((1, 2, -7)),
        logprobs=rng.choice((None, None, 0)),
        prompt_logprobs=rng.choice((None, None, None, 0)),
        min_p=0.1 if rng.random() < 0.2 else 0.0,
    )
    return Request(request_id=f"r{number}", prompt_token_ids=prompt, params=params, priority=rng.choice((0, 0, 1, -3)))


def run_schedule(seed: int) -> dict[str, int]:
    """Play one random schedule to its end; return what happened, so that the whole run can be shown to cover all."""
    rng = random.Random(seed)
    limits = make_limits(rng)
    drafter = GuessingDrafter(rng, limits, EOS, rng.choice((0.2, 0.6, 1.0))) if rng.random() < 0.5 else None
    loop = StepLoop(
        limits,
        depth=rng.choice((0, 1, 1, 2)),
        eos_token_ids=EOS,
        prefix_cache=rng.random() < 0.7,
        policy=rng.choice(("fcfs", "priority")),
        drafter=drafter,
    )
    num_requests = rng.choice((1, 4, 6, 8))
    arrival_rate, abort_rate = rng.choice((0.2, 1.0, 1.0)), rng.choice((0.0, 0.0, 0.05, 0.3))
    prompts: list[tuple[int, ...]] = []
    for _ in range(4000):
        if len(loop.outcomes) == num_requests and not loop.is_busy:
            break
        while len(loop.outcomes) < num_requests and rng.random() < arrival_rate:
            loop.add(make_request(rng, limits, len(loop.outcomes), prompts))
        if loop.outcomes and rng.random() < abort_rate:
            loop.abort(rng.choice(list(loop.outcomes)))
        loop.turn()
    loop.check_idle()
    loop.check_outcomes()
    stats = loop.scheduler.stats()
    ends = Counter("abort" if outcome.is_aborted else outcome.finish_reason for outcome in loop.outcomes.values())
    return {
        "preempted": stats.num_preemptions,
        "hit": stats.num_prefix_tokens_hit,
        "aborted": ends["abort"],
        "failed": ends["error"],
        "stopped": ends["stop"],
        "cut": ends["length"],
        **{f"accepted {num}": loop.device.accepted[num] for num in range(4)},
    }


@pytest.mark.parametrize("part", range(10))
def test_random_schedules(part: int) -> None:
    totals: dict[str, int] = {}
    for seed in range(part * 1000, (part + 1) * 1000):
        try:
            for name, number in run_schedule(seed).items():
                totals[name] = totals.get(name, 0) + number
        except Exception as error:
            raise AssertionError(f"schedule {seed} failed") from error
    assert min(totals.values()) > 50, totals
