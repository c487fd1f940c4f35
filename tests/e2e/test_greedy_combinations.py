"""Greedy tokens equal transformers' in some combinations of what the engine may do with the batch."""

import pytest
from doubles_demo_engine import MakeEngine
from doubles_greedy import Case, Reference, check, prompts_for_fast_tests, random_combinations


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", random_combinations(6), ids=str)
def test_greedy_tokens_equal_transformers(case: Case, make_engine: MakeEngine, reference: Reference) -> None:
    check(case, make_engine, prompts_for_fast_tests(case, reference))
