"""How late the event loop runs what is due: a timer that measures its own delay."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping

from aserve.metrics import Metrics

INTERVAL_S = 0.02
WINDOW = 3000  # samples: one minute


class LoopLag:
    """Measures while started; quantiles are of the last minute."""

    def __init__(self, metrics: Metrics) -> None:
        self._histogram = metrics.loop_lag
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._timer: asyncio.TimerHandle | None = None
        metrics.add_source(self.gauges)

    def start(self) -> None:
        """Measure from now on."""
        self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def quantile(self, fraction: float) -> float:
        """Return a quantile of the delays in seconds; 0 before the first sample."""
        ordered = sorted(self._samples)
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0

    def reset(self) -> None:
        """Forget the samples so far; the histogram keeps them."""
        self._samples.clear()

    def gauges(self) -> Mapping[str, float]:
        """Return what a scrape shows beside the histogram."""
        return {
            "loop_lag_p50_seconds": self.quantile(0.5),
            "loop_lag_p99_seconds": self.quantile(0.99),
            "loop_lag_max_seconds": self.quantile(1.0),
        }

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not loop.time(): uvloop reads the clock once a turn, so a slow callback before this one would not show.
        self._timer = loop.call_later(INTERVAL_S, self._measure, loop, time.monotonic() + INTERVAL_S)

    def _measure(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        lag_s = max(0.0, time.monotonic() - due_s)
        self._samples.append(lag_s)
        self._histogram.observe(lag_s)
        self._arm(loop)
