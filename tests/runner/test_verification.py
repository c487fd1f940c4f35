"""Steps that verify drafts, laid out for the device and run by a model that is a table."""

from doubles_runner import TableModel, make_runner, single_plan

from aserve.request import SamplingParams
from aserve.runner.verification import as_decodes, draft_cells, sampled_places
from aserve.scheduler.plan import StepPlan

# A decode, a row with two drafts and one with one, a chunk that is sampled and one that is not.
PLAN = StepPlan(
    3,
    rows=[4, 1, 6, 2, 0],
    num_computed=[9, 20, 7, 0, 5],
    num_scheduled=[1, 3, 2, 4, 3],
    is_sampled=[True, True, True, True, False],
    num_decodes=1,
    drafts=[[50, 51], [60]],
)


def test_drafts_are_written_behind_the_token_that_is_known() -> None:
    assert draft_cells(PLAN).T.tolist() == [[1, 21, 50], [1, 22, 51], [6, 8, 60]]


def test_every_token_of_a_row_with_drafts_is_sampled_from() -> None:
    places, num_behind = sampled_places(PLAN)
    assert places.tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert num_behind.tolist() == [0, 2, 1, 0, 1, 0, 0]


def test_without_drafts_the_last_token_is() -> None:
    plan = StepPlan(0, [3, 1, 2], [4, 0, 0], [1, 5, 6], [True, False, True], 1)
    assert [part.tolist() for part in sampled_places(plan)] == [[0, 2], [0, 0]]
    assert as_decodes(plan) is plan


def test_as_decodes_each_token_sees_the_keys_up_to_its_own() -> None:
    plan = as_decodes(PLAN)
    assert plan.rows == [4, 1, 1, 1, 6, 6, 2, 0]
    assert plan.num_computed == [9, 20, 21, 22, 7, 8, 0, 5]
    assert plan.num_scheduled == [1, 1, 1, 1, 1, 1, 4, 3]
    assert plan.is_sampled == [True] * 7 + [False]
    assert (plan.num_decodes, plan.drafts, plan.num_tokens) == (6, [], PLAN.num_tokens)


def test_a_step_samples_after_each_draft_and_the_next_begins_after_the_last_right_one() -> None:
    """The table says t + 1 after t."""
    runner, _ = make_runner(TableModel())
    runner.launch(single_plan([5, 6, 7], SamplingParams(temperature=0.0, logprobs=0))).result(timeout=10)
    plan = StepPlan(1, [0], [3], [4], [True], drafts=[[9, 30, 40]], page_updates=[(0, 1, 20), (0, 2, 21)])
    tokens = runner.launch(plan).result(timeout=10)
    assert tokens.token_ids == [9, 10, 31, 41]
    assert tokens.logprobs is not None
    assert [entry.token_id for entry in tokens.logprobs if entry] == tokens.token_ids
    following = StepPlan(2, [0], [5], [1], [True], 1)  # the first draft was right, so token 10 stands at position 5
    assert runner.launch(following).result(timeout=10).token_ids == [11]
    runner.close()


def test_a_row_whose_logits_are_bad_after_a_draft_says_where() -> None:
    model = TableModel()
    model.bad_token_id = 9
    runner, _ = make_runner(model)
    runner.launch(single_plan([5, 6, 7])).result(timeout=10)
    plan = StepPlan(1, [0], [3], [3], [True], drafts=[[9, 10]], page_updates=[(0, 1, 20)])
    tokens = runner.launch(plan).result(timeout=10)
    assert tokens.token_ids == [9, -1, 11]
    assert list(tokens.errors) == [1]
    runner.close()


def test_more_rows_than_sequences_may_stand_in_a_step() -> None:
    runner, _ = make_runner(TableModel(), max_num_seqs=1, max_num_tokens=20)
    runner.launch(single_plan([5])).result(timeout=10)
    updates = [(0, place, place) for place in range(4)]
    plan = StepPlan(1, [0], [1], [10], [True], drafts=[list(range(7, 16))], page_updates=updates)
    assert runner.launch(plan).result(timeout=10).token_ids == list(range(7, 17))
    runner.close()
