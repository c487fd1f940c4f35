"""From the timings of a load to rates and latencies, over the whole run and over its steady part.

Terms as everywhere: TTFT time to first token, TPOT mean time per output token after the first, ITL time between events
that carry text, E2E whole request; goodput counts the requests within objectives.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aserve.bench.clients import RequestTiming
from aserve.bench.report import percentile

STEADY_SHARE = 0.95  # of the most requests that were open at a time
OPEN_LOOP_RAMP = 0.2  # share of the arrivals' time that an open loop takes to fill the server

Summary = dict[str, object]


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run, in seconds on ``time.perf_counter``."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.end_s - self.start_s

    def __contains__(self, time_s: float) -> bool:
        return self.start_s <= time_s <= self.end_s


def whole_window(timings: Sequence[RequestTiming], start_s: float) -> Window:
    """From the start of the load to the end of its last request."""
    return Window(start_s, max((timing.end_s for timing in timings), default=start_s))


def steady_window(timings: Sequence[RequestTiming], is_open_loop: bool) -> Window:
    """The part in which the load neither builds up nor runs out.

    In a closed loop, from the first to the last time that 95 % of its streams are open; in an open one, from a fifth of
    the arrivals' time to the last arrival.
    """
    if is_open_loop:
        starts = sorted(timing.start_s for timing in timings)
        return Window(starts[0] + OPEN_LOOP_RAMP * (starts[-1] - starts[0]), starts[-1])
    changes = sorted([(timing.start_s, 1) for timing in timings] + [(timing.end_s, -1) for timing in timings])
    num_open, counts = 0, []
    for _, change in changes:
        num_open += change
        counts.append(num_open)
    enough = math.ceil(STEADY_SHARE * max(counts))
    full = [place for place, count in enumerate(counts) if count >= enough]
    return Window(changes[full[0]][0], changes[full[-1] + 1][0])


def summarise(timings: Sequence[RequestTiming], window: Window, objectives: Mapping[str, float]) -> Summary:
    """Reduce what happened within ``window``; latencies in ms, ``objectives`` too.

    A first token and a gap count when they come, TPOT and E2E when the request ends.
    """
    done = [timing for timing in timings if timing.error is None and timing.arrivals_s]
    ended = [timing for timing in done if timing.end_s in window]
    latencies = {
        "ttft": [ttft_ms(timing) for timing in done if timing.arrivals_s[0] in window],
        "tpot": [tpot_ms(timing) for timing in ended],
        "itl": [gap for timing in done for gap in _gaps_ms(timing, window)],
        "e2e": [e2e_ms(timing) for timing in ended],
    }
    duration_s = window.duration_s or math.nan
    num_tokens = sum(tokens_within(timing, window) for timing in done)
    summary: Summary = {
        "duration_s": window.duration_s,
        "completed": len(ended),
        "requests_per_s": len(ended) / duration_s,
        "output_tokens_per_s": num_tokens / duration_s,
    }
    if objectives:
        summary["goodput_requests_per_s"] = sum(_is_good(timing, objectives) for timing in ended) / duration_s
    return summary | {f"{name}_ms": describe(values) for name, values in latencies.items()}


def describe(values: Sequence[float]) -> dict[str, float]:
    """Return mean, percentiles and the largest; NaN for no values."""
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else math.nan
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {"mean": mean} | {name: percentile(ordered, share) for name, share in shares.items()}


def ttft_ms(timing: RequestTiming) -> float:
    """Time to first token."""
    return 1e3 * (timing.arrivals_s[0] - timing.start_s)


def tpot_ms(timing: RequestTiming) -> float:
    """Time per output token after the first."""
    return 1e3 * (timing.arrivals_s[-1] - timing.arrivals_s[0]) / max(1, timing.num_output_tokens - 1)


def e2e_ms(timing: RequestTiming) -> float:
    """Time of the whole request."""
    return 1e3 * (timing.end_s - timing.start_s)


def _gaps_ms(timing: RequestTiming, window: Window) -> Iterator[float]:
    return (1e3 * (b - a) for a, b in itertools.pairwise(timing.arrivals_s) if b in window)


def tokens_within(timing: RequestTiming, window: Window) -> float:
    """Deal a request's tokens out to its events evenly, since an event does not say how many it carries."""
    first = bisect.bisect_left(timing.arrivals_s, window.start_s)
    last = bisect.bisect_right(timing.arrivals_s, window.end_s)
    return timing.num_output_tokens * (last - first) / len(timing.arrivals_s)


def _is_good(timing: RequestTiming, objectives: Mapping[str, float]) -> bool:
    measured = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}
    return all(measured[name](timing) <= limit for name, limit in objectives.items())
