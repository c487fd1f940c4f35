"""10,000 random schedules against each request run alone: aborts, tiny pools, overlap, preemption, shared prompts."""

import random
from collections import deque

import pytest
from doubles_scheduler import DeviceDouble, Reference, run_alone

from aserve.request import Request, SamplingParams
from aserve.scheduler.limits import Limits
from aserve.scheduler.scheduler import Scheduler

VOCAB = 12
EOS = frozenset({11})


def make_limits(rng: random.Random) -> Limits:
    page_size = rng.choice((1, 1, 2, 3, 4, 16))
    return Limits(
        vocab_size=VOCAB,
        max_model_len=rng.choice((12, 20, 40)),
        max_num_seqs=rng.choice((1, 2, 3, 5, 8)),
        max_num_batched_tokens=rng.choice((1, 2, 5, 7, 16, 64)),
        num_pages=max(2, rng.choice((12, 20, 30, 60)) // page_size),
        page_size=page_size,
        context_cost=rng.choice((0.0, 0.0, 0.05, 0.3)),
    )


def make_request(rng: random.Random, limits: Limits, number: int, prompts: list[tuple[int, ...]]) -> Request:
    longest = min(limits.max_model_len, limits.num_pages * limits.page_size) - 1
    if prompts and rng.random() < 0.5:
        prompt = rng.choice(prompts)
        prompt = (prompt[: rng.randint(1, len(prompt))] if rng.random() < 0.4 else prompt) + tuple(
            rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 0, 1, 3)))
        )
        prompt = prompt[:longest]
    else:
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, longest)))
    prompts.append(prompt)
    params = SamplingParams(
        max_tokens=rng.choice((None, 0, 1, 2, 5, 12, 12)),
        min_tokens=rng.choice((0, 0, 2)),
        ignore_eos=rng.random() < 0.4,
        stop_token_ids=(3,) if rng.random() < 0.1 else (),
        seed=rng.choice((1, 2, -7)),
        logprobs=rng.choice((None, None, 0)),
        prompt_logprobs=rng.choice((None, None, None, 0)),
        min_p=0.1 if rng.random() < 0.1 else 0.0,
    )
    return Request(request_id=f"r{number}", prompt_token_ids=prompt, params=params, priority=rng.choice((0, 0, 1, -3)))


class Client:
    """Collects the deltas of one request and compares them with the reference."""

    def __init__(self, request: Request, reference: Reference) -> None:
        self.request, self.reference = request, reference
        self.token_ids: list[int] = []
        self.logprobs: list = []
        self.prompt_logprobs = None
        self.finish_reason: str | None = None
        self.is_aborted = False
        self.num_deltas = 0

    def put(self, delta, page_size: int) -> None:
        assert not self.is_aborted, "a delta after an abort"
        assert self.finish_reason is None, "a delta after the end"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        assert (delta.prompt_logprobs is not None) == (self.num_deltas == 0 and bool(self.reference.prompt_logprobs))
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.num_deltas += 1
        assert delta.num_cached_tokens % page_size == 0
        assert delta.num_cached_tokens < len(self.request.prompt_token_ids)
        assert self.token_ids == self.reference.token_ids[: len(self.token_ids)]
        self.finish_reason = delta.finish_reason
        if delta.finish_reason is not None:
            assert self.token_ids == self.reference.token_ids
            assert delta.finish_reason == self.reference.finish_reason
            assert delta.stop_token_id == self.reference.stop_token_id
            assert (delta.error is not None) == self.reference.error
            assert self.prompt_logprobs == self.reference.prompt_logprobs
            if self.request.params.logprobs is not None:
                assert self.logprobs == self.reference.logprobs


def run_schedule(seed: int) -> dict[str, int]:
    """Play one random schedule to its end; return what happened, so that the whole run can be shown to cover all."""
    rng = random.Random(seed)
    limits = make_limits(rng)
    scheduler = Scheduler(
        limits,
        eos_token_ids=EOS,
        prefix_cache=rng.random() < 0.7,
        policy=rng.choice(("fcfs", "priority")),
    )
    device = DeviceDouble(limits)
    allocator = scheduler._memory.cache.allocator
    free = allocator.free

    def free_and_poison(pages) -> None:
        pages = list(pages)
        free(pages)
        device.poison(pages)

    allocator.free = free_and_poison
    depth = rng.choice((0, 1, 1, 2))
    prompts: list[tuple[int, ...]] = []
    clients: dict[str, Client] = {}
    num_requests = rng.randint(1, 8)
    arrival_rate, abort_rate = rng.choice((0.1, 0.5, 1.0)), rng.choice((0.0, 0.0, 0.05, 0.3))
    pending: deque[int] = deque()
    num_idle_turns = num_turns = 0
    while len(clients) < num_requests or scheduler.has_unfinished or pending:
        num_turns += 1
        assert num_turns < 4000, "no end in sight"
        while len(clients) < num_requests and rng.random() < arrival_rate:
            request = make_request(rng, limits, len(clients), prompts)
            reference = run_alone(request, limits, EOS, request.params.seed % 2**64)
            clients[request.request_id] = Client(request, reference)
            scheduler.add(request)
        if clients and rng.random() < abort_rate:
            client = rng.choice(list(clients.values()))
            was_open = client.finish_reason is None and not client.is_aborted
            assert scheduler.abort(client.request.request_id) is was_open
            assert scheduler.abort(client.request.request_id) is False
            client.is_aborted = client.is_aborted or was_open
            scheduler.check_integrity()
        plan = scheduler.schedule()
        scheduler.check_integrity()
        if plan is not None:
            device.launch(plan)
            pending.append(plan.step_id)
        while pending and (len(pending) > depth or plan is None):
            pending.popleft()
            for delta in scheduler.commit(device.complete()):
                clients[delta.request_id].put(delta, limits.page_size)
            scheduler.check_integrity()
            if plan is None:
                break
        num_idle_turns += plan is None
    for client in clients.values():
        assert client.is_aborted or client.finish_reason is not None, "a request never ended"
    stats = scheduler.stats()
    assert stats.num_held_pages == 0
    assert stats.num_waiting == stats.num_running == stats.num_in_flight == 0
    return {
        "preempted": stats.num_preemptions,
        "hit": stats.num_prefix_tokens_hit,
        "aborted": stats.num_finished["abort"],
        "failed": stats.num_finished["error"],
        "stopped": stats.num_finished["stop"],
        "steps": device.num_steps,
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
    assert min(totals.values()) > 20, totals
