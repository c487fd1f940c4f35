"""Launching, failing and closing, with a model that is a table."""

import threading
import time
from typing import Any

import pytest
import torch
from doubles_runner import TableModel, make_runner, single_plan
from torch import Tensor

from aserve.errors import EngineDeadError
from aserve.request import SamplingParams
from aserve.scheduler.plan import RowStart, StepPlan


def decode_plan(rows: list[int], positions: list[int], step_id: int = 1) -> StepPlan:
    n = len(rows)
    return StepPlan(step_id, rows, positions, [1] * n, [True] * n, num_decodes=n)


def test_tokens_flow_from_step_to_step_without_the_host() -> None:
    runner, _ = make_runner(TableModel())
    futures = [runner.launch(single_plan([5, 6, 7]))]
    futures += [runner.launch(decode_plan([0], [3 + step], step + 1)) for step in range(5)]
    results = [future.result(timeout=10) for future in futures]
    assert [tokens.token_ids for tokens in results] == [[8], [9], [10], [11], [12], [13]]
    assert [tokens.step_id for tokens in results] == list(range(6))
    assert all(tokens.step_time_s > 0 for tokens in results)
    runner.close()


def test_launch_never_waits_for_the_thread() -> None:
    """While the device is stuck in a step, more steps are taken at once; they complete in order afterwards."""
    gate = threading.Event()
    threads: set[str] = set()

    def wait(ids: Tensor) -> None:
        threads.add(threading.current_thread().name)
        assert gate.wait(10)

    runner, _ = make_runner(TableModel(on_forward=wait))
    futures = [runner.launch(single_plan([1, 2]))] + [runner.launch(decode_plan([0], [2 + i])) for i in range(3)]
    assert not any(future.done() for future in futures)  # a launch that waited would have seen the first step fail
    order: list[int] = []
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: order.append(i))  # type: ignore[misc]
    gate.set()
    assert futures[-1].result(timeout=10).token_ids == [6]
    assert order[:3] == [0, 1, 2]
    assert len(threads) == 1
    assert threading.current_thread().name not in threads
    runner.close()


def test_a_failing_step_fails_its_future_and_all_later_ones() -> None:
    def fail(ids: Tensor) -> None:
        if 13 in ids.tolist():
            raise RuntimeError("the device is on fire")

    runner, _ = make_runner(TableModel(on_forward=fail))
    good = runner.launch(single_plan([1, 2]))
    bad = runner.launch(single_plan([13], row=1, first_page=8))
    later = runner.launch(decode_plan([0], [2]))
    assert good.result(timeout=10).token_ids == [3]
    with pytest.raises(RuntimeError, match="on fire"):
        bad.result(timeout=10)
    with pytest.raises(EngineDeadError, match="an earlier step failed") as raised:
        later.result(timeout=10)
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(EngineDeadError):
        runner.launch(decode_plan([0], [3])).result(timeout=10)
    runner.close()


def test_a_bad_row_is_an_error_of_that_row_alone() -> None:
    model = TableModel()
    model.bad_token_id = 20
    runner, _ = make_runner(model)
    plan = single_plan([20], row=2)
    for row, token_id in ((0, 5), (1, 30)):
        extra = single_plan([token_id], row=row, first_page=4 * row + 4)
        plan.rows += extra.rows
        plan.num_computed += [0]
        plan.num_scheduled += [1]
        plan.is_sampled += [True]
        plan.row_starts += extra.row_starts
        plan.page_updates += extra.page_updates
    tokens = runner.launch(plan).result(timeout=10)
    assert tokens.token_ids == [-1, 6, 31]
    assert list(tokens.errors) == [0]
    assert "not finite" in tokens.errors[0]
    after = runner.launch(decode_plan([2, 0, 1], [1, 1, 1])).result(timeout=10)
    assert after.token_ids == [1, 7, 32]  # the bad row went on with id 0, which every vocabulary has
    assert after.errors == {}
    runner.close()


def test_close_waits_for_launched_steps_and_may_be_called_twice() -> None:
    runner, _ = make_runner(TableModel(on_forward=lambda ids: time.sleep(0.1)))
    futures = [runner.launch(single_plan([1])), runner.launch(decode_plan([0], [1]))]
    runner.close()
    assert all(future.done() for future in futures)
    assert futures[1].result().token_ids == [3]
    runner.close()
    with pytest.raises(EngineDeadError, match="closed"):
        runner.launch(single_plan([1]))


def test_a_plan_without_rows_only_brings_news() -> None:
    runner, _ = make_runner(TableModel())
    start = single_plan([4, 5])
    news = StepPlan(0, row_starts=start.row_starts, page_updates=start.page_updates)
    assert runner.launch(news).result(timeout=10).token_ids == []
    start.row_starts, start.page_updates = [], []
    assert runner.launch(start).result(timeout=10).token_ids == [6]
    runner.close()


def test_unsampled_chunks_bring_no_tokens() -> None:
    runner, _ = make_runner(TableModel())
    plan = single_plan([1, 2, 3, 4])
    plan.num_scheduled, plan.is_sampled = [3], [False]
    assert runner.launch(plan).result(timeout=10).token_ids == []
    assert runner.launch(StepPlan(1, [0], [3], [1], [True])).result(timeout=10).token_ids == [5]
    runner.close()


def test_the_last_position_of_the_context_can_be_sampled() -> None:
    runner, _ = make_runner(TableModel(), max_model_len=8, num_pages=2, page_size=4)
    plan = single_plan(list(range(8)))
    plan.page_updates = [(0, 0, 0), (0, 1, 1)]
    assert runner.launch(plan).result(timeout=10).token_ids == [8]
    runner.close()


def test_warm_up_runs_real_steps_and_touches_no_page_that_is_handed_out() -> None:
    seen: list[int] = []
    runner, parts = make_runner(TableModel(on_forward=lambda ids: seen.append(len(ids))), num_pages=8)
    before = [(layer.key.clone(), layer.value.clone()) for layer in parts.layers_kv]
    runner.warm_up()
    assert seen == [63, 63, 1, 4]
    for layer, (key, value) in zip(parts.layers_kv, before, strict=True):
        torch.testing.assert_close(layer.key[:8], key[:8], equal_nan=True)
        torch.testing.assert_close(layer.value[:8], value[:8], equal_nan=True)
    assert runner.launch(single_plan([5])).result(timeout=10).token_ids == [6]
    runner.close()


@pytest.mark.parametrize("sizes", [{"max_model_len": 2, "num_pages": 1}, {"max_num_seqs": 1}, {"max_num_tokens": 4}])
def test_warm_up_fits_the_smallest_engines(sizes: dict[str, Any]) -> None:
    runner, _ = make_runner(TableModel(), **sizes)
    runner.warm_up()
    runner.close()


def test_prompt_logprobs_come_chunk_by_chunk() -> None:
    """The table gives 8 to the right successor and 0 to all others, so both values are known."""
    runner, _ = make_runner(TableModel(vocab_size=50))
    right = 8 - float(torch.log(torch.exp(torch.tensor(8.0)) + 49))
    wrong = right - 8
    prompt = [3, 4, 5, 20, 21, 7]
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    plan = single_plan(prompt, params)
    neighbour = RowStart(1, [9], 1, 0, SamplingParams(temperature=0.0))
    plan = StepPlan(
        0,
        rows=[1, 0],
        num_computed=[0, 0],
        num_scheduled=[1, 4],
        is_sampled=[True, False],
        row_starts=[*plan.row_starts, neighbour],
        page_updates=[*plan.page_updates, (1, 0, 9)],
    )
    first = runner.launch(plan).result(timeout=10)
    last = runner.launch(StepPlan(1, [0], [4], [2], [True])).result(timeout=10)
    assert first.prompt_logprobs is not None
    assert list(first.prompt_logprobs) == [1]
    assert [entry.token_id for entry in first.prompt_logprobs[1]] == [4, 5, 20, 21]
    values = [entry.logprob for entry in first.prompt_logprobs[1]]
    assert values == pytest.approx([right, right, wrong, right], abs=1e-5)
    assert [entry.top[0][0] for entry in first.prompt_logprobs[1]] == [4, 5, 6, 21]
    assert last.prompt_logprobs is not None
    assert [entry.token_id for entry in last.prompt_logprobs[0]] == [7]
    assert last.token_ids == [8]
    # Taken up again after preemption, the output tokens are not part of the prompt.
    again = StepPlan(2, [0], [0], [7], [True], row_starts=[RowStart(0, [*prompt, 8, 9], 6, 0, params)])
    again.is_sampled = [False]
    repeated = runner.launch(again).result(timeout=10).prompt_logprobs
    assert repeated is not None
    assert [entry.token_id for entry in repeated[0]] == [4, 5, 20, 21, 7]
    assert runner.launch(decode_plan([1], [1])).result(timeout=10).prompt_logprobs is None
    runner.close()


def test_long_prompts_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.runner.prompt_scores.MAX_LOGIT_ROWS", 3)
    runner, _ = make_runner(TableModel())
    prompt = list(range(10, 20))
    plan = single_plan(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    scores = runner.launch(plan).result(timeout=10).prompt_logprobs
    assert scores is not None
    assert [entry.token_id for entry in scores[0]] == prompt[1:]
    assert all(entry.top == () for entry in scores[0])
    runner.close()


def test_the_table_rows_of_gone_sequences_do_not_matter() -> None:
    """A row is taken over by a shorter sequence while its table still names the former's pages."""
    runner, _ = make_runner(TableModel())
    runner.launch(single_plan(list(range(30)))).result(timeout=10)
    assert runner.launch(single_plan([40], first_page=20)).result(timeout=10).token_ids == [41]
    assert runner.launch(decode_plan([0], [1])).result(timeout=10).token_ids == [42]
    runner.close()
