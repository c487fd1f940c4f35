"""Greedy tokens equal transformers' whatever the engine does with the batch: each factor alone, and the whole grid."""

import pytest
from doubles_demo_engine import MakeEngine
from doubles_greedy import Case, Reference, check, grid, prompts_for_fast_tests, single_factors


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", list(single_factors()), ids=str)
def test_greedy_tokens_equal_transformers(case: Case, make_engine: MakeEngine, reference: Reference) -> None:
    check(case, make_engine, prompts_for_fast_tests(case, reference))


@pytest.mark.full
@pytest.mark.parametrize("case", grid(), ids=str)
def test_greedy_tokens_equal_transformers_on_the_whole_grid(
    case: Case, make_engine: MakeEngine, reference: Reference
) -> None:
    check(case, make_engine, reference)
