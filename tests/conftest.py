"""Fixtures shared by all tests."""

import os

import pytest
import torch

from aserve.model_files import ModelFiles

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; Triton reads this where they are defined


@pytest.fixture(scope="session")
def demo_files() -> ModelFiles:
    """The embedded demo model, taken from the cache folder or by pip."""
    from aserve.demo_model import find_demo_model

    return find_demo_model()
