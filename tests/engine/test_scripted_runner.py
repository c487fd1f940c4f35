"""The device double: order, tables, failures, logits, logprobs."""

import math
import time
from collections import Counter

import pytest
from doubles_engine import LIMITS, letters

from aserve.request import SamplingParams
from aserve.runner.scripted import RowFailure, ScriptedRunner, report, sample
from aserve.scheduler.plan import RowStart, StepPlan


def prefill(step_id, row, tokens, **params):
    start = RowStart(row, list(tokens), len(tokens), 7, SamplingParams(**params))
    return StepPlan(step_id, [row], [0], [len(tokens)], [True], 0, [start], [(row, 0, 5), (row, 2, 6)])


def decode(step_id, row, num_computed):
    return StepPlan(step_id, [row], [num_computed], [1], [True], 1)


def test_steps_complete_in_order_only_when_told():
    runner = ScriptedRunner(LIMITS, letters, step_time_s=None)
    futures = [runner.launch(prefill(1, 3, [97, 98])), runner.launch(decode(2, 3, 2))]
    assert not futures[0].done()
    runner.complete_next()
    assert [future.done() for future in futures] == [True, False]
    first = futures[0].result().token_ids[0]
    assert first == letters([97, 98], 2)
    assert runner.token_pool[3] == [97, 98, first]
    assert runner.page_table[3] == [5, -1, 6]
    runner.complete_next()
    assert futures[1].result().token_ids == [letters([97, 98, first], 3)]
    runner.close()


def test_the_thread_takes_its_time_for_each_step():
    runner = ScriptedRunner(LIMITS, letters, step_time_s=0.02)
    start = time.perf_counter()
    futures = [runner.launch(prefill(1, 0, [97])), runner.launch(decode(2, 0, 1)), runner.launch(decode(3, 0, 2))]
    times = []
    for future in futures:
        future.result(5)
        times.append(time.perf_counter() - start)
    assert times[0] >= 0.02
    assert times[2] >= 0.06
    runner.close()
    runner.close()


def test_failures_of_a_step_of_a_row_and_a_stall():
    def script(tokens, position):
        if tokens[0] == 98:
            raise RowFailure("not this one")
        return 97

    runner = ScriptedRunner(LIMITS, script)
    runner.fail_step(1, OSError("broken"))
    runner.stall_from(3)
    two = prefill(1, 0, [97])
    other = prefill(1, 1, [98])
    for name in ("rows", "num_computed", "num_scheduled", "is_sampled", "row_starts", "page_updates"):
        getattr(two, name).extend(getattr(other, name))
    tokens = runner.launch(two).result(5)
    assert (tokens.token_ids, tokens.errors) == ([97, -1], {1: "not this one"})
    assert isinstance(runner.launch(decode(2, 0, 1)).exception(5), OSError)
    assert runner.launch(decode(3, 0, 1)).result(5).token_ids == [97]
    stalled = runner.launch(decode(4, 0, 2))
    time.sleep(0.05)
    assert not stalled.done()
    runner.close()
    assert stalled.cancelled()


@pytest.mark.parametrize("num_computed", [0, 2, 5])
def test_a_plan_that_does_not_fit_the_history_fails_the_step(num_computed):
    runner = ScriptedRunner(LIMITS, letters, step_time_s=None)
    runner.launch(prefill(1, 0, [97, 98, 99]))
    runner.complete_next()
    future = runner.launch(decode(2, 0, num_computed))
    runner.complete_next()
    assert isinstance(future.exception(), RuntimeError)


def test_logits_are_sampled_by_seed_and_position_and_greedily():
    logits = [0.0, 1.0, 2.0]
    assert sample(logits, SamplingParams(temperature=0), 1, 1) == 2
    params = SamplingParams(temperature=1.0)
    draws = [sample(logits, params, seed, position) for seed in range(60) for position in range(60)]
    assert draws[:60] == [sample(logits, params, 0, position) for position in range(60)]
    normaliser = sum(map(math.exp, logits))
    for token, count in Counter(draws).items():
        assert count / len(draws) == pytest.approx(math.exp(logits[token]) / normaliser, abs=0.03)


def test_reported_logprobs_are_those_of_the_softmax():
    entry = report([0.0, math.log(2), math.log(5)], 1, 2)
    assert entry.logprob == pytest.approx(math.log(2 / 8))
    assert entry.top == ((2, pytest.approx(math.log(5 / 8))), (1, pytest.approx(math.log(2 / 8))))


def test_logprobs_come_for_the_rows_that_ask():
    runner = ScriptedRunner(LIMITS, lambda tokens, position: 120, step_time_s=None)
    runner.launch(prefill(1, 0, [97, 98, 99], logprobs=2, prompt_logprobs=1))
    tokens = runner.complete_next()
    assert tokens.logprobs[0].token_id == 120
    assert tokens.logprobs[0].top == ((120, 0.0), (0, -math.inf))
    assert [entry.token_id for entry in tokens.prompt_logprobs[0]] == [98, 99]
    runner.launch(prefill(2, 1, [97]))
    assert runner.complete_next().logprobs is None
