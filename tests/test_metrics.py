"""The Prometheus text, read back by prometheus_client's own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aserve.metrics import TOKEN_EDGES_S, Histogram, Metrics
from aserve.request import FinishReason


def read(metrics):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_counters_histograms_and_sources_are_exported():
    metrics = Metrics("demo")
    metrics.num_generation_tokens = 7
    metrics.inter_token.observe(0.0009)
    metrics.inter_token.observe(0.0055)
    metrics.inter_token.observe(99)
    metrics.record_finish(FinishReason.STOP, 10, 3, 0.2)
    metrics.add_source(lambda: {"kv_pages_free": 5, "num_preemptions_total": 2})
    samples = read(metrics)
    model = ("model_name", "demo")
    assert samples["aserve_generation_tokens_total", (model,)] == 7
    assert samples["aserve_request_success_total", (("finished_reason", "stop"), model)] == 1
    assert samples["aserve_request_success_total", (("finished_reason", "abort"), model)] == 0
    assert samples["aserve_kv_pages_free", (model,)] == 5
    assert samples["aserve_num_preemptions_total", (model,)] == 2
    for edge, count in (("0.0005", 0), ("0.001", 1), ("0.006", 2), ("10.0", 2), ("+Inf", 3)):
        assert samples["aserve_inter_token_latency_seconds_bucket", (("le", edge), model)] == count
    assert samples["aserve_inter_token_latency_seconds_count", (model,)] == 3
    assert samples["aserve_inter_token_latency_seconds_sum", (model,)] == pytest.approx(99.0064)


def test_two_engines_count_apart():
    first, second = Metrics("a"), Metrics("b")
    first.num_steps = 3
    assert read(second)["aserve_steps_total", (("model_name", "b"),)] == 0


def test_names_that_dashboards_look_for_are_there():
    names = {name for name, _ in read(Metrics("demo"))}
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "step_time_seconds",
        "step_batch_size",
        "loop_lag_seconds",
    ):
        assert f"aserve_{name}_count" in names
    for name in ("prompt_tokens", "generation_tokens", "prompt_tokens_cached", "request_aborts"):
        assert f"aserve_{name}_total" in names


def test_token_buckets_resolve_less_than_ten_milliseconds():
    assert sum(edge < 0.01 for edge in TOKEN_EDGES_S) >= 5
    assert list(TOKEN_EDGES_S) == sorted(set(TOKEN_EDGES_S))


def test_quantiles_are_upper_edges():
    histogram = Histogram("h", "", (1, 2, 3))
    assert histogram.quantile(0.5) == 0.0
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    assert (histogram.quantile(0.5), histogram.quantile(0.75), histogram.quantile(1.0)) == (1, 2, 3)
    histogram.observe(9)
    assert histogram.quantile(1.0) == float("inf")
