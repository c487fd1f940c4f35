"""Quantiles of what a server's histograms gained between two scrapes, against values worked out by hand."""

import pytest
from doubles_http import in_loop, live_server

from aserve.bench.clients import Server
from aserve.bench.server_metrics import Scrape, quantile, scrape, subtract, summarise_server

INF = float("inf")


def test_quantiles_lie_on_straight_lines_within_buckets() -> None:
    counts = {0.001: 0.0, 0.002: 50.0, 0.01: 90.0, 0.05: 100.0, INF: 100.0}
    assert quantile(counts, 0.5) == pytest.approx(0.002)
    assert quantile(counts, 0.25) == pytest.approx(0.0015)
    assert quantile(counts, 0.7) == pytest.approx(0.002 + 0.008 * 20 / 40)
    assert quantile(counts, 0.99) == pytest.approx(0.01 + 0.04 * 9 / 10)


def test_a_quantile_beyond_the_last_edge_is_that_edge_and_none_of_nothing_is_zero() -> None:
    assert quantile({0.1: 1.0, INF: 10.0}, 0.99) == 0.1
    assert quantile({0.1: 0.0, INF: 0.0}, 0.5) == 0
    assert quantile({}, 0.5) == 0


def test_only_what_came_in_between_counts() -> None:
    before = Scrape({"steps_total": 7.0, "idle_launches_total": 2.0}, {"loop_lag_seconds": {0.001: 10.0, INF: 90.0}})
    after = Scrape({"steps_total": 27.0, "idle_launches_total": 2.0}, {"loop_lag_seconds": {0.001: 30.0, INF: 110.0}})
    assert subtract({1.0: 5.0}, {1.0: 3.0}) == {1.0: 2.0}
    summary = summarise_server(before, after)
    assert (summary["steps"], summary["idle_launches"]) == (20, 0)
    assert summary["loop_lag_ms"]["p99"] == pytest.approx(0.99)


def test_a_server_without_metrics_is_said_nothing_of() -> None:
    assert summarise_server(None, Scrape({}, {})) == {}


@in_loop
async def test_scrape_a_live_server() -> None:
    async with live_server() as live:
        found = await scrape(Server(live.url, ""))
        assert found is not None
        assert found.counters["steps_total"] == 0
        assert found.histograms["loop_lag_seconds"][INF] >= 0
        assert await scrape(Server("http://127.0.0.1:9", "")) is None
