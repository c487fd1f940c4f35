"""What an engine counts and times, and its Prometheus text.

Counting happens for every token, so it touches plain integers and lists only; prometheus_client sees them when a
scrape asks. Each engine has its own ``Metrics``: nothing is registered globally.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from aserve.request import FinishReason

TOKEN_EDGES_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1,
    2.5, 10,
)  # fmt: skip
FIRST_TOKEN_EDGES_S = (
    0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 40, 80, 160,
)  # fmt: skip
REQUEST_EDGES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
LAG_EDGES_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
SIZE_EDGES = tuple(2**power for power in range(15))


class Histogram:
    """Counts of values by bucket; an edge is the largest value of its bucket."""

    __slots__ = ("counts", "edges", "help", "name", "total")

    def __init__(self, name: str, help: str, edges: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    @property
    def num_observed(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def quantile(self, fraction: float) -> float:
        """Return the upper edge of the quantile's bucket; 0 without values, infinity past the last edge."""
        wanted, seen = fraction * self.num_observed, 0
        if wanted == 0:
            return 0.0
        for edge, count in zip(self.edges, self.counts, strict=False):
            seen += count
            if seen >= wanted:
                return edge
        return float("inf")

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Yield ``(edge, cumulative count)`` as Prometheus wants them."""
        seen = 0
        for edge, count in zip((*map(float, self.edges), float("inf")), self.counts, strict=True):
            seen += count
            yield ("+Inf" if edge == float("inf") else str(edge)), seen


class Metrics:
    """The numbers of one engine. Times are seconds, counters only grow."""

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_cached_tokens = 0
        self.num_steps = 0
        self.num_aborts = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_EDGES_S
        )
        self.inter_token = Histogram("inter_token_latency_seconds", "Time between two tokens.", TOKEN_EDGES_S)
        self.end_to_end = Histogram("e2e_request_latency_seconds", "Arrival to end of a request.", REQUEST_EDGES_S)
        self.queue_time = Histogram("request_queue_time_seconds", "Arrival to first step.", FIRST_TOKEN_EDGES_S)
        self.prompt_tokens = Histogram("request_prompt_tokens", "Prompt tokens of a request.", SIZE_EDGES)
        self.generation_tokens = Histogram("request_generation_tokens", "Output tokens of a request.", SIZE_EDGES)
        self.step_time = Histogram("step_time_seconds", "Time of a step on the device.", TOKEN_EDGES_S)
        self.step_turnaround = Histogram(
            "step_turnaround_seconds", "Completion of a step to the launch of the next.", LAG_EDGES_S
        )
        self.batch_size = Histogram("step_batch_size", "Sequences in a step.", SIZE_EDGES)
        self.step_tokens = Histogram("iteration_tokens", "Tokens computed by a step.", SIZE_EDGES)
        self.loop_lag = Histogram("loop_lag_seconds", "How late the event loop runs a timer.", LAG_EDGES_S)
        self._sources: list[Callable[[], Mapping[str, float]]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    content_type = CONTENT_TYPE_LATEST

    def add_source(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Ask ``read`` at each scrape for ``name -> value``; names that end in ``_total`` are counters."""
        self._sources.append(read)

    def record_finish(self, reason: FinishReason, num_prompt: int, num_output: int, seconds: float) -> None:
        """Count the end of a request."""
        self.finished[reason] += 1
        self.end_to_end.observe(seconds)
        self.prompt_tokens.observe(num_prompt)
        self.generation_tokens.observe(num_output)

    def render(self) -> bytes:
        """Return the Prometheus text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield every metric; called by prometheus_client."""
        yield from self._counters()
        for value in vars(self).values():
            if isinstance(value, Histogram):
                yield self._histogram(value)
        for read in self._sources:
            for name, number in read().items():
                family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                yield self._single(family, name.removesuffix("_total"), SOURCE_HELP.get(name, name), number)

    def _counters(self) -> Iterator[Metric]:
        for name, help, number in (
            ("prompt_tokens", "Prompt tokens of started requests.", self.num_prompt_tokens),
            ("generation_tokens", "Output tokens.", self.num_generation_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", self.num_cached_tokens),
            ("steps", "Steps completed.", self.num_steps),
            ("request_aborts", "Requests ended by their client or at shutdown.", self.num_aborts),
        ):
            yield self._single(CounterMetricFamily, name, help, number)
        finished = CounterMetricFamily(
            "aserve_request_success", "Requests finished, by reason.", labels=("model_name", "finished_reason")
        )
        for reason, count in self.finished.items():
            finished.add_metric((self.model_name, reason.value), count)
        yield finished

    def _single(
        self, family: type[CounterMetricFamily | GaugeMetricFamily], name: str, help: str, number: float
    ) -> Metric:
        metric = family(f"aserve_{name}", help, labels=("model_name",))
        metric.add_metric((self.model_name,), number)
        return metric

    def _histogram(self, histogram: Histogram) -> Metric:
        metric = HistogramMetricFamily(f"aserve_{histogram.name}", histogram.help, labels=("model_name",))
        metric.add_metric((self.model_name,), list(histogram.buckets()), histogram.total)
        return metric


SOURCE_HELP = {
    "num_requests_running": "Requests on a row of the batch.",
    "num_requests_waiting": "Requests that wait for a row.",
    "steps_in_flight": "Steps launched whose tokens are not known yet; two while a step is prepared ahead.",
    "kv_pages_free": "Pages that hold nothing.",
    "kv_pages_cached": "Pages that only the prefix cache holds; they can be evicted.",
    "kv_pages_held": "Pages that running requests and leases hold.",
    "kv_pages_leased": "Pages that are kept for the next turn of open conversations.",
    "kv_cache_usage_ratio": "Share of the pages that running requests hold.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache.",
    "prefix_cache_hit_ratio": "Share of the prompt tokens looked up that were found, since the start.",
    "num_preemptions_total": "Sequences that gave up their pages and started again.",
    "spec_decode_num_draft_tokens_total": "Tokens guessed ahead and verified.",
    "spec_decode_num_accepted_tokens_total": "Tokens guessed ahead that the model chose, too.",
    "idle_launches_total": "Steps whose launch found the device with nothing to do.",
    "late_compilations_total": "Device kernels made ready after the start; each made a step wait.",
}
