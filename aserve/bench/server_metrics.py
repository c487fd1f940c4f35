"""What a server's own ``/metrics`` say of the time between two scrapes; nothing of a server without these metrics."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from aserve.bench.clients import Server, fetch
from aserve.errors import AserveError

PREFIX = "aserve_"
HISTOGRAMS = {
    "loop_lag": "loop_lag_seconds",
    "step_turnaround": "step_turnaround_seconds",
    "step_time": "step_time_seconds",
}
COUNTERS = {
    "steps": "steps_total",
    "idle_launches": "idle_launches_total",
    "late_compilations": "late_compilations_total",
}


@dataclass(frozen=True, slots=True)
class Scrape:
    """Counters by name, and histograms as cumulative counts by upper edge; names without the prefix."""

    counters: dict[str, float]
    histograms: dict[str, dict[float, float]]


async def scrape(server: Server) -> Scrape | None:
    """Read the metrics of ``server``; None if it has none."""
    try:
        text = (await fetch(server, "/metrics")).decode()
        families = list(text_string_to_metric_families(text))
    except (AserveError, ValueError):
        return None
    result = Scrape({}, {})
    for sample in itertools.chain.from_iterable(family.samples for family in families):
        name = sample.name.removeprefix(PREFIX)
        if name.endswith("_bucket"):
            edges = result.histograms.setdefault(name.removesuffix("_bucket"), {})
            edges[float(sample.labels["le"])] = sample.value
        else:
            result.counters[name] = sample.value
    return result


def summarise_server(before: Scrape | None, after: Scrape | None) -> dict[str, Any]:
    """Return counts, and percentiles in ms, of what happened between two scrapes."""
    if before is None or after is None:
        return {}
    summary: dict[str, Any] = {
        name: int(after.counters[key] - before.counters.get(key, 0))
        for name, key in COUNTERS.items()
        if key in after.counters
    }
    for name, key in HISTOGRAMS.items():
        if key in after.histograms:
            counts = subtract(after.histograms[key], before.histograms.get(key, {}))
            summary[f"{name}_ms"] = {f"p{share:g}": 1e3 * quantile(counts, share / 100) for share in (50, 99)}
    return summary


def subtract(after: Mapping[float, float], before: Mapping[float, float]) -> dict[float, float]:
    """Return the cumulative counts of what came in between."""
    return {edge: count - before.get(edge, 0) for edge, count in after.items()}


def quantile(counts: Mapping[float, float], share: float) -> float:
    """Estimate a quantile from cumulative ``counts`` by upper edge, as Prometheus does."""
    edges = sorted(counts)
    total = counts[edges[-1]] if edges else 0
    if not total:
        return 0.0
    lower, below = 0.0, 0.0
    for edge in edges:
        if counts[edge] >= share * total:
            inside = counts[edge] - below
            return lower if edge == float("inf") else lower + (edge - lower) * (share * total - below) / inside
        lower, below = edge, counts[edge]
    return lower
