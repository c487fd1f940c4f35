"""Rates, latencies and the steady part of made-up timings whose values are known."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aserve.bench.clients import RequestTiming
from aserve.bench.plot import plot_run
from aserve.bench.summary import Window, steady_window, summarise, whole_window


def stream(start_s: float, first_s: float, gap_s: float, count: int, **fields: object) -> RequestTiming:
    """A request that starts, has its first event and then one every ``gap_s``."""
    arrivals = [start_s + first_s + gap_s * event for event in range(count)]
    return RequestTiming(start_s, arrivals, arrivals[-1], num_output_tokens=count, **fields)  # type: ignore[arg-type]


def test_latencies_and_rates_of_the_whole_run() -> None:
    timings = [stream(10.0, 0.5, 0.1, 11), stream(10.5, 1.0, 0.2, 6)]
    summary = summarise(timings, whole_window(timings, 10.0), {})
    assert summary["duration_s"] == pytest.approx(2.5)
    assert summary["completed"] == 2
    assert summary["requests_per_s"] == pytest.approx(2 / 2.5)
    assert summary["output_tokens_per_s"] == pytest.approx(17 / 2.5)
    expected = {"ttft_ms": (750, 1000), "tpot_ms": (150, 200), "e2e_ms": (1750, 2000)}
    for name, (mean, high) in expected.items():
        values = summary[name]
        assert isinstance(values, dict)
        assert (values["mean"], values["max"]) == (pytest.approx(mean), pytest.approx(high))
    itl = summary["itl_ms"]
    assert isinstance(itl, dict)
    assert itl["mean"] == pytest.approx((10 * 100 + 5 * 200) / 15)
    assert (itl["p50"], itl["p99"]) == (pytest.approx(100), pytest.approx(200))


def test_several_tokens_in_one_event_count_as_such() -> None:
    timing = stream(0.0, 1.0, 1.0, 5)
    timing.num_output_tokens = 20
    inside = summarise([timing], Window(1.5, 3.5), {})  # two of its five events
    assert inside["output_tokens_per_s"] == pytest.approx(8 / 2)
    tpot = summarise([timing], whole_window([timing], 0.0), {})["tpot_ms"]
    assert isinstance(tpot, dict)
    assert tpot["p50"] == pytest.approx(1e3 * 4 / 19)


def test_a_window_takes_what_happens_within_it() -> None:
    timings = [stream(0.0, 1.0, 1.0, 5), stream(2.0, 1.0, 1.0, 2)]  # end at 5 and 4
    inside = summarise(timings, Window(2.5, 4.5), {})
    assert inside["completed"] == 1
    ttft = inside["ttft_ms"]
    assert isinstance(ttft, dict)
    assert ttft["max"] == pytest.approx(1000)
    assert inside["output_tokens_per_s"] == pytest.approx(4 / 2)  # at 3, 4 and 3, 4


def test_a_gap_belongs_to_the_window_in_which_it_ends() -> None:
    timing = RequestTiming(0.0, [1.0, 2.0, 3.5, 4.4, 8.0], 8.0, num_output_tokens=5)
    itl = summarise([timing], Window(2.5, 4.5), {})["itl_ms"]
    assert isinstance(itl, dict)
    assert (itl["max"], itl["mean"]) == (pytest.approx(1500), pytest.approx((1500 + 900) / 2))


@pytest.mark.parametrize(
    ("objectives", "good"),
    [({"ttft": 600.0}, 1), ({"tpot": 150.0}, 1), ({"e2e": 1900.0}, 1), ({"ttft": 2000.0, "tpot": 2000.0}, 2),
     ({"ttft": 600.0, "tpot": 90.0}, 0)],
)  # fmt: skip
def test_goodput_counts_requests_within_all_objectives(objectives: dict[str, float], good: int) -> None:
    timings = [stream(0.0, 0.5, 0.1, 11), stream(0.0, 1.0, 0.2, 6)]
    summary = summarise(timings, whole_window(timings, 0.0), objectives)
    assert summary["goodput_requests_per_s"] == pytest.approx(good / 2)


def test_failed_requests_count_for_nothing_but_time() -> None:
    timings = [stream(0.0, 0.5, 0.1, 11), stream(0.0, 1.0, 1.0, 4, error="broke")]
    summary = summarise(timings, whole_window(timings, 0.0), {"ttft": 1e9})
    assert summary["duration_s"] == pytest.approx(4)
    assert summary["completed"] == 1
    assert summary["output_tokens_per_s"] == pytest.approx(11 / 4)
    assert summary["goodput_requests_per_s"] == pytest.approx(1 / 4)


def test_nothing_that_succeeded_is_no_number() -> None:
    timings = [RequestTiming(0.0, end_s=1.0, error="broke")]
    itl = summarise(timings, whole_window(timings, 0.0), {})["itl_ms"]
    assert isinstance(itl, dict)
    assert math.isnan(itl["p99"])


def test_the_closed_loop_is_steady_while_all_streams_run() -> None:
    # 4 streams begin at 0, 1, 2, 3; each sends two requests of 10 s, one after the other
    timings = [stream(begin + turn * 10.0, 1.0, 1.0, 10) for begin in range(4) for turn in range(2)]
    assert steady_window(timings, is_open_loop=False) == Window(3.0, 20.0)


def test_one_short_stream_less_does_not_end_the_steady_part() -> None:
    timings = [stream(0.0, 0.5, 0.5, 20) for _ in range(40)]  # end at 10
    timings[0] = stream(0.0, 0.5, 0.5, 4)
    assert steady_window(timings, is_open_loop=False) == Window(0.0, 10.0)


def test_the_open_loop_is_steady_after_a_fifth_of_the_arrivals() -> None:
    timings = [stream(float(start), 0.5, 0.5, 20) for start in range(11)]
    assert steady_window(timings, is_open_loop=True) == Window(2.0, 10.0)


@pytest.mark.parametrize("count", [0, 1, 30])
def test_the_plot_is_well_formed_and_has_what_was_measured(count: int, tmp_path: Path) -> None:
    timings = [stream(0.1 * number, 0.05, 0.01 * (1 + number % 3), 12) for number in range(count)]
    window = Window(0.0, max(1.0, 0.1 * count))
    root = ElementTree.fromstring(plot_run(timings, window, Window(0.2, 0.8), "a < b & c"))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert "a < b & c" in texts
    assert {"ttft", "tpot", "e2e"} <= set(texts)
    for line in root.iter(f"{space}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 720
            assert 0 <= y <= 200
    assert len(list(root.iter(f"{space}polyline"))) == (4 if count else 1)
