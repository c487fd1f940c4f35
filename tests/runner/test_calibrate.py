"""The search for the token budget, on a machine whose cost is a formula."""

import time
from collections.abc import Callable

import pytest

from aserve.runner.calibrate import MAX_CPU_TOKENS, StepTimer, measure_step_cost
from aserve.scheduler.plan import StepPlan, StepTokens


class FormulaMachine:
    """Advances the thread's CPU clock by ``fixed_s`` a step, ``token_s`` a token and ``key_s`` an earlier key."""

    def __init__(self, fixed_s: float, token_s: float, key_s: float) -> None:
        self.now_s = 0.0
        self.largest_s = 0.0
        self._fixed_s, self._token_s, self._key_s = fixed_s, token_s, key_s

    def execute(self, plan: StepPlan) -> StepTokens:
        assert set(plan.rows) == {8}
        assert len(plan.rows) <= 8
        num_keys = sum(count * computed for computed, count in zip(plan.num_computed, plan.num_scheduled, strict=True))
        step_s = self._fixed_s + self._token_s * plan.num_tokens + self._key_s * num_keys
        self.largest_s = max(self.largest_s, step_s)
        self.now_s += step_s
        return StepTokens(plan.step_id, [])


@pytest.fixture
def make_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float, float], FormulaMachine]:
    def make(fixed_s: float, token_s: float, key_s: float) -> FormulaMachine:
        machine = FormulaMachine(fixed_s, token_s, key_s)
        monkeypatch.setattr(time, "thread_time", lambda: machine.now_s)
        return machine

    return make


@pytest.mark.parametrize("token_s", [0.0001, 0.0004, 0.001, 0.003, 0.008])
@pytest.mark.parametrize("fixed_s", [0.0, 0.01, 0.05])
def test_a_full_step_stays_under_a_quarter_second_and_comes_near(
    make_machine: Callable[..., FormulaMachine], fixed_s: float, token_s: float
) -> None:
    machine = make_machine(fixed_s, token_s, 0.0)
    cost = measure_step_cost(StepTimer(machine.execute, 8, 8192))
    step_s = fixed_s + token_s * cost.max_num_batched_tokens
    assert step_s < 0.25
    fitting = min((0.2 - fixed_s) / token_s, MAX_CPU_TOKENS)  # a fifth is left for a busier machine
    assert cost.max_num_batched_tokens >= 0.85 * fitting - 16
    assert machine.largest_s < 0.45  # never tries much more
    assert cost.context_cost == pytest.approx(0, abs=1e-12)


def test_a_slow_machine_gets_the_smallest_step(make_machine: Callable[..., FormulaMachine]) -> None:
    assert measure_step_cost(StepTimer(make_machine(0.5, 0.1, 0.0).execute, 8, 8192)).max_num_batched_tokens == 16


def test_what_an_earlier_key_costs(make_machine: Callable[..., FormulaMachine]) -> None:
    """Without a fixed part, the unit is exactly ``token_s``."""
    cost = measure_step_cost(StepTimer(make_machine(0.0, 0.001, 2e-6).execute, 8, 8192))
    assert cost.context_cost == pytest.approx(0.002, rel=1e-6)


@pytest.mark.parametrize("max_model_len", [2, 16, 40])
def test_short_contexts_bound_what_is_tried(make_machine: Callable[..., FormulaMachine], max_model_len: int) -> None:
    cost = measure_step_cost(StepTimer(make_machine(0.0, 1e-5, 0.0).execute, 8, max_model_len))
    assert cost.max_num_batched_tokens == 8 * (max_model_len - 1) // 2
