"""What ``AsyncEngine.stats`` reports."""

from dataclasses import dataclass

from aserve.scheduler.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine; counts of requests are exact at the moment of the call."""

    is_ready: bool
    is_alive: bool
    num_open: int  # requests whose sink has not had its last call
    num_running: int
    num_waiting: int
    num_aborts: int  # requests ended by their client or at shutdown, since the start
    num_steps: int
    num_late_compilations: int  # kernels made ready after the start, each of which made a step wait
    num_idle_launches: int  # steps whose launch found the device idle
    scheduler: SchedulerStats

    def gauges(self) -> dict[str, float]:
        """Return the numbers that a Prometheus scrape adds to the counters."""
        pages = self.scheduler
        return {
            "num_requests_running": self.num_running,
            "num_requests_waiting": self.num_waiting,
            "steps_in_flight": self.scheduler.num_in_flight,
            "kv_pages_free": pages.num_free_pages,
            "kv_pages_cached": pages.num_cached_pages,
            "kv_pages_held": pages.num_held_pages,
            "kv_pages_leased": pages.num_leased_pages,
            "kv_cache_usage_ratio": pages.num_held_pages / pages.num_pages,
            "prefix_cache_queries_total": pages.num_prefix_tokens_queried,
            "prefix_cache_hits_total": pages.num_prefix_tokens_hit,
            "prefix_cache_hit_ratio": pages.num_prefix_tokens_hit / max(1, pages.num_prefix_tokens_queried),
            "num_preemptions_total": pages.num_preemptions,
            "spec_decode_num_draft_tokens_total": pages.num_draft_tokens,
            "spec_decode_num_accepted_tokens_total": pages.num_accepted_tokens,
            "late_compilations_total": self.num_late_compilations,
            "idle_launches_total": self.num_idle_launches,
        }
