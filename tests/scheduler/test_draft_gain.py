"""The rule by which a step has drafts: what they may bring is more than what they cost those in it."""

import pytest

from aserve.scheduler.draft_gain import pays_for_row, pays_for_step
from aserve.scheduler.drafter import Draft


def draft(num_expected: float) -> Draft:
    return Draft([1, 2, 3, 4, 5, 6], num_expected)


@pytest.mark.parametrize(
    ("expected", "num_rows", "is_worth_it"),
    [
        ([1.25], 1, False),  # a quarter of a token more than without, for 0.4 of one
        ([1.5], 1, True),
        ([3.0], 5, True),  # two more for its row; all five lose two fifths of a token
        ([3.0], 6, False),
        ([3.0, 3.0], 10, True),
        ([3.0, 3.0], 11, False),
        ([5.0], 32, False),  # one of many may expect what it likes
        ([5.0] * 4, 32, True),
        ([2.0] * 32, 32, True),
        ([], 8, False),
    ],
)
def test_drafts_are_verified_if_their_rows_gain_what_all_rows_lose(
    expected: list[float], num_rows: int, is_worth_it: bool
) -> None:
    assert pays_for_step([draft(num) for num in expected], num_rows) is is_worth_it


def test_a_row_that_expects_no_more_than_the_step_it_misses_has_no_part_in_it() -> None:
    assert [pays_for_row(draft(num)) for num in (0.0, 0.5, 1.0, 1.5, 4.0)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("num_tokens", "token_ids", "num_expected"),
    [(-1, [], 0.0), (0, [], 0.0), (1, [1], 1.0), (2, [1, 2], 2.0), (3, [1, 2, 3], 2.5), (9, [1, 2, 3, 4, 5, 6], 2.5)],
)
def test_of_a_draft_that_is_cut_no_more_is_expected_than_it_has(
    num_tokens: int, token_ids: list[int], num_expected: float
) -> None:
    assert draft(2.5).cut(num_tokens) == Draft(token_ids, num_expected)
