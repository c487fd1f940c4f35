"""Counts that a metrics page shows; reading them costs nothing per sequence."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. Free, cached and held pages add up to all pages; the other ``num_`` fields below them only grow."""

    num_waiting: int
    num_running: int
    num_in_flight: int  # launched steps
    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # kept for prompts with the same beginning, evicted on demand
    num_held_pages: int  # used by sequences, or leased
    num_leased_pages: int  # locked for open conversations; those that two of them share count twice
    num_preemptions: int
    num_prefix_tokens_queried: int  # tokens of admitted sequences that were looked up in the prefix cache
    num_prefix_tokens_hit: int
    num_draft_tokens: int  # verified
    num_accepted_tokens: int  # of these, what the model chose, too
