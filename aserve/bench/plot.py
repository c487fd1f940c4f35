"""A run as an SVG picture, without a plotting library: throughput over time, gaps, and latency by percentile."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from aserve.bench.clients import RequestTiming
from aserve.bench.report import percentile
from aserve.bench.summary import Window, e2e_ms, tpot_ms, ttft_ms

WIDTH, PANEL_HEIGHT, MARGIN_LEFT, MARGIN_TOP, MARGIN_BOTTOM = 720, 200, 80, 44, 32
NUM_BINS = 60
NUM_TICKS = 5
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0")
STYLE = "text{font:12px sans-serif;fill:#333}.axis{stroke:#999}.grid{stroke:#eee}"


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from ``low`` to ``high`` to pixels; a logarithmic one shows powers of ten."""

    low: float
    high: float
    start_px: float
    end_px: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the pixel of ``value``."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        share = (self._scaled(value) - low) / (high - low) if high > low else 0.0
        return self.start_px + share * (self.end_px - self.start_px)

    def ticks(self) -> list[float]:
        """Return values to label."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers]
        step = _round_step((self.high - self.low) / NUM_TICKS)
        return [step * tick for tick in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.is_log else value


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next((factor * power for factor in (1, 2, 5) if factor * power >= least), 10 * power)


def plot_run(timings: Sequence[RequestTiming], whole: Window, steady: Window, title: str) -> str:
    """Return the SVG's text. The steady part is shaded; gaps are those between events that carry text."""
    done = [timing for timing in timings if timing.error is None and timing.arrivals_s]
    panels = [
        _throughput_panel(done, whole, steady),
        _gap_panel([1e3 * (b - a) for timing in done for a, b in itertools.pairwise(timing.arrivals_s)]),
        _percentile_panel(done),
    ]
    height = len(panels) * PANEL_HEIGHT
    shifted = [f'<g transform="translate(0,{i * PANEL_HEIGHT})">{panel}</g>' for i, panel in enumerate(panels)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{MARGIN_LEFT}" y="14" font-weight="bold">{escape(title)}</text>{"".join(shifted)}</svg>\n'
    )


def _throughput_panel(done: Sequence[RequestTiming], whole: Window, steady: Window) -> str:
    bin_s = max(whole.duration_s, 1e-9) / NUM_BINS
    rates = [0.0] * NUM_BINS
    for timing in done:
        weight = timing.num_output_tokens / len(timing.arrivals_s) / bin_s
        for arrival_s in timing.arrivals_s:
            rates[min(NUM_BINS - 1, max(0, int((arrival_s - whole.start_s) / bin_s)))] += weight
    x = _x_axis(0.0, whole.duration_s)
    y = _y_axis(0.0, max(rates, default=0.0))
    edges = [max(0.0, min(whole.duration_s, time_s - whole.start_s)) for time_s in (steady.start_s, steady.end_s)]
    left, right = (x.place(edge) for edge in edges)
    shade = (
        f'<rect x="{left:.1f}" y="{y.end_px}" width="{max(0.0, right - left):.1f}" '
        f'height="{y.start_px - y.end_px}" fill="#4269d0" opacity="0.08"/>'
    )
    points = [(bin_s * (place + 0.5), rate) for place, rate in enumerate(rates)]
    return shade + _frame(x, y, "output tokens/s over seconds") + _line(x, y, points, COLOURS[0])


def _gap_panel(gaps: Sequence[float]) -> str:
    high = max(percentile(gaps, 0.999), 1e-3) if gaps else 1.0
    counts = [0] * NUM_BINS
    for gap in gaps:
        if gap <= high:
            counts[min(NUM_BINS - 1, int(gap / high * NUM_BINS))] += 1
    x, y = _x_axis(0.0, high), _y_axis(0.0, max(counts))
    bars = [
        f'<rect x="{x.place(high * place / NUM_BINS):.1f}" y="{y.place(count):.1f}" '
        f'width="{(x.end_px - x.start_px) / NUM_BINS:.1f}" height="{y.start_px - y.place(count):.1f}" '
        f'fill="{COLOURS[0]}"/>'
        for place, count in enumerate(counts)
        if count
    ]
    return _frame(x, y, "inter-token gaps by ms, without the longest 0.1 %") + "".join(bars)


def _percentile_panel(done: Sequence[RequestTiming]) -> str:
    measures: dict[str, Callable[[RequestTiming], float]] = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}
    curves = {name: sorted(map(measure, done)) for name, measure in measures.items()}
    values = [value for curve in curves.values() for value in curve if value > 0]
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    x = _x_axis(0.0, 100.0)
    y = Axis(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9), *_Y_RANGE, is_log=True)
    lines = [
        _line(x, y, [(share, percentile(curve, share / 100)) for share in range(101)], colour)
        for curve, colour in zip(curves.values(), COLOURS, strict=False)
        if curve
    ]
    legend = [
        f'<text x="{WIDTH - 150 + 50 * place}" y="{MARGIN_TOP - 8}" style="fill:{colour}">{name}</text>'
        for place, (name, colour) in enumerate(zip(curves, COLOURS, strict=False))
    ]
    return _frame(x, y, "latency in ms by percentile of requests") + "".join(lines + legend)


_Y_RANGE = (PANEL_HEIGHT - MARGIN_BOTTOM, MARGIN_TOP)


def _x_axis(low: float, high: float) -> Axis:
    return Axis(low, high, MARGIN_LEFT, WIDTH - 20)


def _y_axis(low: float, high: float) -> Axis:
    return Axis(low, high, *_Y_RANGE)


def _frame(x: Axis, y: Axis, caption: str) -> str:
    parts = [f'<text x="{x.start_px}" y="{MARGIN_TOP - 8}">{escape(caption)}</text>']
    for tick in y.ticks():
        place = y.place(tick)
        parts.append(f'<line class="grid" x1="{x.start_px}" x2="{x.end_px}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text x="{x.start_px - 6}" y="{place + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')
    for tick in x.ticks():
        place = x.place(tick)
        parts.append(f'<text x="{place:.1f}" y="{y.start_px + 16}" text-anchor="middle">{tick:,.6g}</text>')
    corners = f'x1="{x.start_px}" x2="{x.end_px}" y1="{y.start_px}" y2="{y.start_px}"'
    return "".join(parts) + f'<line class="axis" {corners}/>'


def _line(x: Axis, y: Axis, points: Sequence[tuple[float, float]], colour: str) -> str:
    places = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
