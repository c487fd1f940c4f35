"""Fixtures of the greedy tests and of those on a GPU: engines around weights that are read once for a file."""

from collections.abc import Iterator

import pytest
from doubles_demo_engine import MakeEngine, demo_engines
from doubles_greedy import Reference
from reference.margins import read_reference

from aserve.model_files import ModelFiles


@pytest.fixture(scope="module")
def make_engine(demo_files: ModelFiles) -> Iterator[MakeEngine]:
    with demo_engines(demo_files) as make:
        yield make


@pytest.fixture(scope="module")
def reference() -> Reference:
    prompts = read_reference("greedy_reference.json")
    assert len(prompts) == 32
    return prompts
