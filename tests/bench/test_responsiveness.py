"""The parts of the responsiveness bench on a scripted engine whose times are known."""

import pytest
from doubles_http import Live, count_up, in_loop, live_server

from aserve.bench import responsiveness

STEP_S = 0.01


async def measure_gaps(live: Live, long_prompt: int, seed: int) -> dict[str, float]:
    return await responsiveness.measure_gaps(live.engine, long_prompt=long_prompt, seed=seed)


@pytest.mark.alone
@in_loop
async def test_gaps_are_those_of_the_steps() -> None:
    async with live_server(step_time_s=STEP_S) as live:
        alone = await measure_gaps(live, 0, 0)
        beside = [await measure_gaps(live, 4000, seed) for seed in (0, 1)]
    assert alone["tokens seen"] == responsiveness.NUM_TOKENS - 1
    for row in (alone, *beside):
        assert row["gap p50 ms"] == pytest.approx(1e3 * STEP_S, rel=0.3)
        assert row["longest step ms"] == pytest.approx(1e3 * STEP_S)
    for row in beside:  # 4,000 tokens take 8 steps of 512, in the second run as well: its prompt is another one
        assert 5 <= row["tokens seen"] <= 14


@pytest.mark.parametrize("transport", ["sse", "ws"])
@in_loop
async def test_lag_of_the_serving_loop_is_read_from_the_server(transport: str) -> None:
    async with live_server(count_up, step_time_s=STEP_S) as live:
        lag = await responsiveness.stream_lag(live.engine, live.url, live.loop_lag, transport, 3, 50, seed=0)
        assert lag["lag max ms"] == 1e3 * live.loop_lag.quantile(1.0)
    assert 0 <= lag["lag p50 ms"] <= lag["lag p99 ms"] <= lag["lag max ms"]


def test_medians_are_taken_of_each_column() -> None:
    rows = [{"a": 1.0, "b": 9.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0, "b": 3.0}]
    assert responsiveness.medians(rows) == {"a": 3.0, "b": 3.0}
