"""Engines whose start and rest do not collect the garbage of a whole test run.

The heap of a test process (torch, transformers, thousands of collected tests) takes a full collection a third of a
second, and hundreds of tests start an engine. ``test_process_tuning.py`` tests the collections themselves.
"""

import gc
import itertools
import time
from typing import Any
from unittest.mock import patch

from aserve.engine.async_engine import AsyncEngine
from aserve.engine.process_tuning import ProcessTuning

IS_COLLECTION_DUE = itertools.cycle([True] + 15 * [False])  # so that garbage of the tests themselves goes


class LightTuning(ProcessTuning):
    """All of it but the full collections."""

    def apply(self) -> None:
        if next(IS_COLLECTION_DUE):
            super().apply()
            return
        with patch.object(gc, "collect"):
            super().apply()

    def _collect_all(self) -> None:
        self._collected_s = time.monotonic()


def make_engine(*args: Any, **parts: Any) -> AsyncEngine:
    """An engine of these arguments with a light tuning."""
    engine = AsyncEngine(*args, **parts)
    engine._tuning = LightTuning()
    return engine
