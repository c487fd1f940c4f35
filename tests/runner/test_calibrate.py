"""The search for the token budget, on a machine whose cost is a formula."""

import time
from collections.abc import Callable

import pytest

from aserve.runner.calibrate import MAX_CPU_TOKENS, StepTimer, measure_step_cost
from aserve.scheduler.plan import StepPlan, StepTokens


class FormulaMachine:
    """Advances all clocks by ``fixed_s`` a step, ``token_s`` a token and ``key_s`` an earlier key."""

    def __init__(self, fixed_s: float, token_s: float, key_s: float) -> None:
        self.now_s = 0.0
        self.largest_s = 0.0
        self.num_rows = 8
        self.num_slow_steps = 0  # that take ten times as long, at first
        self._fixed_s, self._token_s, self._key_s = fixed_s, token_s, key_s

    def execute(self, plan: StepPlan) -> StepTokens:
        assert set(plan.rows) == {self.num_rows}
        assert len(plan.rows) <= self.num_rows
        num_keys = sum(count * computed for computed, count in zip(plan.num_computed, plan.num_scheduled, strict=True))
        step_s = self._fixed_s + self._token_s * plan.num_tokens + self._key_s * num_keys
        if self.num_slow_steps > 0:
            self.num_slow_steps -= 1
            step_s *= 10
        self.largest_s = max(self.largest_s, step_s)
        self.now_s += step_s
        return StepTokens(plan.step_id, [])


@pytest.fixture
def make_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float, float], FormulaMachine]:
    def make(fixed_s: float, token_s: float, key_s: float) -> FormulaMachine:
        machine = FormulaMachine(fixed_s, token_s, key_s)
        for clock in ("thread_time", "perf_counter"):
            monkeypatch.setattr(time, clock, lambda: machine.now_s)
        return machine

    return make


@pytest.mark.parametrize("token_s", [0.0001, 0.0004, 0.001, 0.0018])
@pytest.mark.parametrize("fixed_s", [0.0, 0.01, 0.05])
def test_a_full_step_stays_under_a_quarter_second_and_comes_near(
    make_machine: Callable[..., FormulaMachine], fixed_s: float, token_s: float
) -> None:
    machine = make_machine(fixed_s, token_s, 0.0)
    cost = measure_step_cost(StepTimer(machine.execute, 8, 8192))
    step_s = fixed_s + token_s * cost.max_num_batched_tokens
    assert step_s < 0.25
    fitting = min((0.16 - fixed_s) / token_s, MAX_CPU_TOKENS)  # a third is left for a busier machine
    assert cost.max_num_batched_tokens >= 0.85 * fitting - 16
    assert machine.largest_s < 0.25  # never tries more
    assert machine.now_s < 1.8
    assert cost.context_cost == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("max_num_seqs", [1, 8, 100])
def test_a_slow_machine_can_still_decode_all_rows(
    make_machine: Callable[..., FormulaMachine], max_num_seqs: int
) -> None:
    machine = make_machine(0.5, 0.1, 0.0)
    machine.num_rows = max_num_seqs
    cost = measure_step_cost(StepTimer(machine.execute, max_num_seqs, 8192))
    assert cost.max_num_batched_tokens == max(64, max_num_seqs)


def test_a_busy_moment_costs_no_budget(make_machine: Callable[..., FormulaMachine]) -> None:
    """The first timing is ten times too long, later ones are true: the best counts."""
    machine = make_machine(0.01, 0.0005, 0.0)
    machine.num_slow_steps = 1
    budget = measure_step_cost(StepTimer(machine.execute, 8, 8192)).max_num_batched_tokens
    assert budget >= (0.16 - 0.01) / 0.0005 - 16  # what fits, in multiples of 16


def test_what_an_earlier_key_costs(make_machine: Callable[..., FormulaMachine]) -> None:
    """Without a fixed part, the unit is exactly ``token_s``."""
    cost = measure_step_cost(StepTimer(make_machine(0.0, 0.001, 2e-6).execute, 8, 8192))
    assert cost.context_cost == pytest.approx(0.002, rel=1e-6)


@pytest.mark.parametrize("max_model_len", [2, 16, 40])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 8])
@pytest.mark.parametrize("token_s", [1e-5, 0.1])
def test_short_contexts_bound_what_is_tried(
    make_machine: Callable[..., FormulaMachine], token_s: float, max_num_seqs: int, max_model_len: int
) -> None:
    machine = make_machine(0.0, token_s, 0.0)
    machine.num_rows = max_num_seqs
    budget = measure_step_cost(StepTimer(machine.execute, max_num_seqs, max_model_len)).max_num_batched_tokens
    num_decodes = max_num_seqs // 2
    most = num_decodes + (max_num_seqs - num_decodes) * (max_model_len - 1)
    assert budget == (most if token_s < 0.01 else min(64, most))
