"""The cost of a step: chunks shrink as the context grows, and nothing stands still."""

import random

import pytest

from aserve.scheduler.token_budget import TokenBudget


@pytest.mark.parametrize("context_cost", [0.0, 1e-6, 0.001, 0.05, 3.0])
def test_the_largest_chunk_is_the_largest(context_cost: float) -> None:
    rng = random.Random(1)
    budget = TokenBudget(context_cost)
    for _ in range(500):
        limit, context = rng.choice((0.5, 1.0, 7.0, 256.0, rng.random() * 5000)), rng.randrange(20_000)
        chunk = budget.largest_chunk(limit, context)
        assert chunk == 0 or budget.cost(chunk, context) <= limit
        assert budget.cost(chunk + 1, context) > limit * (1 - 1e-9)


def test_without_context_cost_a_token_costs_one() -> None:
    budget = TokenBudget(0.0)
    assert budget.largest_chunk(64.0, 10_000) == 64
    assert budget.cost(64, 10_000) == 64.0
    assert budget.count_decodes([5000] * 80, 64.0) == 64


def test_the_cost_is_the_sum_over_the_tokens() -> None:
    """n tokens after c cost what they cost one by one, the sum of 1 + k * (c + i + 1/2)."""
    one_by_one = sum(1 + 0.01 * (100 + i + 0.5) for i in range(30))
    assert TokenBudget(0.01).cost(30, 100) == pytest.approx(one_by_one)


@pytest.mark.parametrize("context_cost", [0.0, 0.02])
def test_decodes_are_counted_up_to_the_budget_and_at_least_one(context_cost: float) -> None:
    rng = random.Random(2)
    budget = TokenBudget(context_cost)
    for _ in range(300):
        contexts = [rng.randrange(500) for _ in range(rng.randint(1, 20))]
        limit = rng.random() * 80
        number = budget.count_decodes(contexts, limit)
        costs = [budget.cost(1, context) for context in contexts]
        assert budget.decodes_cost(contexts, len(contexts)) == pytest.approx(sum(costs))
        assert number == 1 or sum(costs[:number]) <= limit + 1e-9
        assert number == len(contexts) or sum(costs[: number + 1]) > limit - 1e-9
