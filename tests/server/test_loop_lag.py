"""The probe sees what holds the loop up."""

import asyncio
import time

import pytest
import uvloop

from aserve.metrics import Metrics
from aserve.server.loop_lag import INTERVAL_S, LoopLag


@pytest.mark.alone
def test_a_blocked_loop_shows() -> None:
    async def run() -> None:
        metrics = Metrics()
        probe = LoopLag(metrics)
        assert probe.quantile(0.5) == 0.0
        probe.start()
        await asyncio.sleep(20 * INTERVAL_S)
        assert len(probe._samples) >= 5
        time.sleep(0.3)  # noqa: ASYNC251 - this is what is to be seen
        await asyncio.sleep(2 * INTERVAL_S)
        assert 0.25 < probe.quantile(1.0) < 2
        assert probe.quantile(0.5) < 0.25
        assert probe.gauges()["loop_lag_max_seconds"] == probe.quantile(1.0)
        assert metrics.loop_lag.num_observed == len(probe._samples)
        probe.reset()
        probe.stop()
        await asyncio.sleep(3 * INTERVAL_S)
        assert probe.quantile(1.0) == 0.0
        assert b"aserve_loop_lag_max_seconds" in metrics.render()

    uvloop.run(run())
