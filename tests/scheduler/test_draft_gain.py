"""The rule by which a step has drafts: what they may bring is more than what they cost those in it."""

from typing import cast

import pytest

from aserve.scheduler.draft_gain import paying_drafts
from aserve.scheduler.drafter import Draft
from aserve.scheduler.sequence import Sequence


def paying(expected: list[float], num_rows: int) -> list[float]:
    """Return what is expected of the drafts that are left of some of which ``expected`` is."""
    proposed = [(cast(Sequence, place), Draft([1, 2, 3, 4, 5, 6], num)) for place, num in enumerate(expected)]
    return [draft.num_expected for _, draft in paying_drafts(proposed, num_rows)]


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
    ],
)
def test_drafts_are_verified_if_their_rows_gain_what_all_rows_lose(
    expected: list[float], num_rows: int, is_worth_it: bool
) -> None:
    assert paying(expected, num_rows) == (expected if is_worth_it else [])


def test_a_row_that_expects_no_more_than_the_step_it_misses_has_no_part_in_it() -> None:
    assert paying([1.0, 0.5, 1.0, 1.0], 1) == []
    assert paying([1.0, 4.0, 0.5, 1.5], 4) == [4.0, 1.5], "nor does it stop the others"
    assert paying([0.0] * 40 + [3.0], 5) == [3.0], "or count against them"


def test_no_drafts_no_rows() -> None:
    assert paying([], 0) == []
    assert paying([], 8) == []
