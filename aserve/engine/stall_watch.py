"""Looks now and then whether the device still makes progress, and reports a step that is stuck, once."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5


class StallWatch:
    """``waited_s`` tells for how long the device has been at its step; ``on_stall`` is called when that is too long."""

    def __init__(self, waited_s: Callable[[], float], timeout_s: float, on_stall: Callable[[], None]) -> None:
        self._waited_s = waited_s
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._is_reported = False
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def stop(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        is_stalled = self._waited_s() > self._timeout_s
        if is_stalled and not self._is_reported:
            logger.error("a step has not completed for %g s", self._timeout_s)
            self._on_stall()
        self._is_reported = is_stalled
        interval_s = min(WATCH_INTERVAL_S, self._timeout_s / 4)
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._look)
