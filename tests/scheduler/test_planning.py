"""What shares a step: budgets, order, fairness between prompts and decodes, policies."""

import itertools

import pytest
from doubles_scheduler import StepLoop, make_limits, make_request

from aserve.scheduler.token_budget import TokenBudget


def started(loop: StepLoop) -> list[str]:
    return [start.request_id for plan in loop.plans for start in plan.row_starts]


def test_decodes_stand_before_chunks_and_share_the_budget() -> None:
    loop = StepLoop(make_limits(max_num_batched_tokens=10), depth=0)
    loop.add(make_request("a", range(4)))
    loop.turn()
    loop.add(make_request("b", range(10, 35), max_tokens=2))
    loop.turn()
    plan = loop.plans[-1]
    assert (plan.num_decodes, plan.num_scheduled, plan.is_sampled) == (1, [1, 9], [True, False])
    assert not plan.is_decode
    loop.turn()
    loop.turn()
    plan = loop.plans[-1]
    assert (plan.num_computed, plan.num_scheduled, plan.is_sampled) == ([6, 18], [1, 7], [True, True])
    loop.turn()
    plan = loop.plans[-1]
    assert (plan.num_decodes, plan.num_scheduled, plan.is_decode) == (2, [1, 1], True)
    loop.run()
    loop.check_outcomes()


def test_a_started_prompt_goes_on_before_a_new_one_starts() -> None:
    loop = StepLoop(make_limits(max_num_batched_tokens=10))
    loop.add(make_request("long", range(25)))
    loop.add(make_request("short", range(30, 33)))
    loop.run()
    assert loop.plans[0].num_scheduled == [10]
    assert loop.plans[2].num_scheduled == [5, 3]


@pytest.mark.parametrize("context_cost", [0.001, 0.01, 0.2])
def test_steps_stay_under_the_budget(context_cost: float) -> None:
    """A step may exceed it by one token, where that is all it computes or all that a new prompt gets."""
    limits = make_limits(
        max_model_len=1000, num_pages=2000, max_num_batched_tokens=128, context_cost=context_cost, max_num_seqs=6
    )
    loop = StepLoop(limits)
    for number in range(4):
        loop.add(make_request(f"r{number}", [number] * 100 * (1 + number), max_tokens=40))
    loop.run()
    loop.check_outcomes()
    budget = TokenBudget(context_cost)
    for plan in loop.plans:
        costs = [budget.cost(n, c) for n, c in zip(plan.num_scheduled, plan.num_computed, strict=True)]
        if plan.num_scheduled[-1] == 1 and (len(costs) == 1 or plan.row_starts):
            costs.pop()
        assert sum(costs) <= 128 + 1e-9


def test_chunks_shrink_as_the_context_grows() -> None:
    loop = StepLoop(make_limits(max_model_len=1000, num_pages=300, max_num_batched_tokens=128, context_cost=0.01))
    loop.add(make_request("r", [3] * 900, max_tokens=1))
    loop.run()
    chunks = [plan.num_scheduled[0] for plan in loop.plans[:-1]]  # the last one is what remains
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] == 88  # 88 * (1 + 0.44) = 126.7, 89 * (1 + 0.445) = 128.6
    assert chunks[-1] < 20


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16])
def test_decodes_and_prompts_get_on_whatever_the_budget(budget: int) -> None:
    """More decodes than a step can hold take turns; a prompt beside them still ends in time proportional to it."""
    loop = StepLoop(make_limits(max_num_batched_tokens=budget, max_num_seqs=16, num_pages=1000), depth=0)
    for number in range(12):
        loop.add(make_request(f"d{number}", [number], max_tokens=150))
    while any(not outcome.token_ids for outcome in loop.outcomes.values()):
        loop.turn()
    long = loop.add(make_request("long", range(48), max_tokens=2))
    before = {name: len(outcome.token_ids) for name, outcome in loop.outcomes.items()}
    num_turns = 0
    while not long.token_ids:
        plan = loop.turn()
        assert budget == 1 or plan.num_decodes, "decodes stopped for a prompt"
        num_turns += 1
    # a quarter of the step, one token every other step at least
    assert num_turns <= 2 * 48 / max(1, budget // 4) + 2
    gained = [len(loop.outcomes[name].token_ids) - number for name, number in before.items() if name != "long"]
    assert max(gained) - min(gained) <= 1 + num_turns // 48, "decodes do not take turns"
    assert sum(gained) >= num_turns * max(1, budget - max(1, budget // 4) - 1) // 2
    loop.run(max_turns=100_000)
    loop.check_outcomes()


def test_a_long_prompt_does_not_stop_running_streams() -> None:
    loop = StepLoop(make_limits(max_num_batched_tokens=16, max_num_seqs=8, num_pages=1000))
    streams = [loop.add(make_request(f"s{number}", [number], max_tokens=60)) for number in range(4)]
    for _ in range(4):
        loop.turn()
    loop.add(make_request("long", [7] * 190, max_tokens=1))
    for _ in range(15):
        before = [len(stream.token_ids) for stream in streams]
        plan = loop.turn()
        assert plan.num_decodes == 4
        assert [len(stream.token_ids) - number for stream, number in zip(streams, before, strict=True)] == [1] * 4


@pytest.mark.parametrize("context_cost", [0.0, 0.01])
def test_prompts_that_compete_do_not_stop_a_stream(context_cost: float) -> None:
    """A prompt that waits for another prompt is not starved by decodes; those go on in every other step at least."""
    limits = make_limits(
        max_model_len=1100, num_pages=4000, max_num_batched_tokens=128, max_num_seqs=8, context_cost=context_cost
    )
    loop = StepLoop(limits, prefix_cache=False)
    stream = loop.add(make_request("stream", [1], max_tokens=1000))
    while not stream.token_ids:
        loop.turn()
    prompts = []
    skipped = []
    for turn in range(160):
        if turn % 12 == 0:  # somewhat more than a step can take, so some always wait
            prompts += [loop.add(make_request(f"p{turn}-{number}", [number] * 1000, max_tokens=2)) for number in (2, 3)]
        plan = loop.turn()
        skipped.append(not plan.num_decodes)
        assert len(plan.rows) > plan.num_decodes, "no prompt got a token"
    assert not any(pair == (True, True) for pair in itertools.pairwise(skipped)), "the stream stood still"
    assert context_cost or not any(skipped)
    assert sum(prompt.finish_reason is not None for prompt in prompts) >= (15 if not context_cost else 1)
    loop.run(max_turns=10_000)
    loop.check_outcomes()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_big_request_starts_though_small_ones_keep_arriving(policy: str) -> None:
    """B25 (4): it needs three quarters of the pool; of the small ones six run at any time."""
    loop = StepLoop(make_limits(num_pages=32, page_size=4, max_model_len=128, max_num_seqs=6), policy=policy)
    number = 0
    big = None
    for turn in range(200):
        while loop.scheduler.num_waiting < 3:
            loop.add(make_request(f"small{number}", [number % 50] * 6, max_tokens=10))
            number += 1
        if turn == 20:
            big = loop.add(make_request("big", range(48), max_tokens=40))
        loop.turn()
        if big is not None and big.token_ids:
            break
    assert big is not None
    assert turn < 20 + 3 * 10 + 20
    loop.run()
    loop.check_outcomes()


def test_a_blocked_head_starts_as_soon_as_pages_suffice_and_is_looked_up_only_then() -> None:
    loop = StepLoop(make_limits(num_pages=32, page_size=4, max_model_len=80, max_num_seqs=6))
    large = loop.add(make_request("large", range(48), max_tokens=10))
    small = [loop.add(make_request(f"small{n}", [n] * 4, max_tokens=40)) for n in range(2)]
    loop.turn()
    loop.add(make_request("big", [9] * 60, max_tokens=4))  # wants 15 pages and leaves 4
    while not large.token_ids:  # its prompt is published, which is an insert
        loop.turn()
    num_lookups = loop.scheduler._memory.cache.tree._clock
    for _ in range(6):
        loop.turn()  # the running ones take pages, so the surplus only falls
    assert loop.scheduler._memory.cache.tree._clock == num_lookups
    while large.finish_reason is None:
        loop.turn()
    loop.turn()
    assert "big" in started(loop)
    assert all(len(outcome.token_ids) < 20 for outcome in small)
    loop.run()
    loop.check_outcomes()


def test_a_start_leaves_pages_for_those_who_run() -> None:
    """16 pages, of which two must remain: the second prompt would leave one."""
    loop = StepLoop(make_limits(num_pages=16, page_size=4, max_model_len=60))
    loop.add(make_request("running", range(16), max_tokens=12))
    loop.turn()
    loop.add(make_request("second", [3] * 44, max_tokens=4))
    while len(loop.outcomes["running"].token_ids) < 10:
        loop.turn()
        assert loop.scheduler.num_waiting == 1
    loop.run()
    loop.check_outcomes()
    assert loop.scheduler.stats().num_preemptions == 0


def test_started_prompts_go_on_by_priority() -> None:
    """What a long prompt's dear tokens leave of a step lets an urgent one start; from then on that one goes first."""
    loop = StepLoop(make_limits(context_cost=0.2, max_num_batched_tokens=40), policy="priority")
    loop.add(make_request("idle", [1] * 190, priority=5, max_tokens=2))
    for _ in range(8):
        loop.turn()
    loop.add(make_request("urgent", [2] * 60, priority=0, max_tokens=2))
    while not loop.outcomes["urgent"].token_ids:
        loop.turn()
    both = [plan for plan in loop.plans if len(plan.rows) == 2]
    assert both[0].rows == [0, 1]
    assert both[0].is_sampled == [False, False]
    assert both[1].rows[0] == 1
    loop.run()
    loop.check_outcomes()


def test_policies_order_the_queue() -> None:
    orders = {"fcfs": ["a", "b", "c", "d"], "priority": ["d", "b", "a", "c"]}
    for policy, expected in orders.items():
        loop = StepLoop(make_limits(max_num_seqs=1), policy=policy)
        for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", -1)):
            loop.add(make_request(name, [1, 2], priority=priority, max_tokens=2))
        loop.run()
        assert started(loop) == expected


def test_rows_are_never_more_than_max_num_seqs() -> None:
    loop = StepLoop(make_limits(max_num_seqs=3))
    for number in range(9):
        loop.add(make_request(f"r{number}", [number], max_tokens=4))
    while loop.is_busy:
        loop.turn()
        assert loop.scheduler.num_running <= 3
        assert all(row < 3 for plan in loop.plans[-1:] for row in plan.rows)
    assert started(loop) == [f"r{number}" for number in range(9)]


def test_end_conditions() -> None:
    """EOS, stop ids, min_tokens, ignore_eos; what ends a request is an output token and is named."""
    cases = {
        "eos": {"ignore_eos": False},
        "ignored": {"ignore_eos": True},
        "stop id": {"ignore_eos": True, "stop_token_ids": (3, 4)},
        "late": {"ignore_eos": False, "min_tokens": 20},
        "both": {"ignore_eos": False, "stop_token_ids": (3,), "min_tokens": 3},
        "short": {"ignore_eos": False, "min_tokens": 99, "max_tokens": 5},
    }
    limits = make_limits(vocab_size=6)
    loop = StepLoop(limits, eos_token_ids=frozenset({1, 2}))
    for seed in range(20):
        for name, params in cases.items():
            loop.add(make_request(f"{name}{seed}", [seed % 6], seed=seed, **{"max_tokens": 30, **params}))
    loop.run()
    loop.check_outcomes()
    for name, outcome in loop.outcomes.items():
        stops = {1, 2} if name.startswith(("eos", "late")) else {3, 4} if name.startswith("stop") else {1, 2, 3}
        if outcome.finish_reason == "stop":
            assert outcome.token_ids[-1] == outcome.stop_token_id in stops
            assert len(outcome.token_ids) >= outcome.request.params.min_tokens
        else:
            assert outcome.finish_reason == "length"
            assert outcome.stop_token_id is None
            assert len(outcome.token_ids) == outcome.request.params.max_tokens
    assert {outcome.finish_reason for outcome in loop.outcomes.values()} == {"stop", "length"}


def test_nothing_to_do() -> None:
    loop = StepLoop(make_limits())
    assert loop.scheduler.schedule() is None
    assert not loop.scheduler.has_unfinished
    assert not loop.scheduler.abort("nobody")
    loop.add(make_request("r", [1], max_tokens=1))
    assert loop.scheduler.has_unfinished
    assert loop.launch() is not None
    assert loop.launch() is None  # the only token is in flight
    loop.run()
