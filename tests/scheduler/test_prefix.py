"""Prefix hits, duplicates and prompt logprobs (B20, B22)."""

import random

import pytest
from doubles_scheduler import StepLoop, digest, fails, make_limits, make_request


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(length)]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_identical_prompts_started_together_share_pages_without_reading_freed_ones(page_size, prefix_cache) -> None:
    """B20: 8 equal prompts compute the same pages at once, then 8 others want pages while the first still decode."""
    limits = make_limits(
        max_model_len=600, num_pages=8000 // page_size, page_size=page_size, max_num_batched_tokens=8 * 64
    )
    loop = StepLoop(limits, prefix_cache=prefix_cache)
    for number in range(8):
        loop.add(make_request(f"same{number}", random_prompt(300, 0), max_tokens=60, seed=number))
    while loop.scheduler.num_waiting or any(outcome.num_deltas < 5 for outcome in loop.outcomes.values()):
        loop.turn()
    held_together = loop.scheduler.stats().num_held_pages
    for number in range(8):
        loop.add(make_request(f"own{number}", random_prompt(300, 1 + number), max_tokens=60))
    loop.run()
    loop.check_outcomes()
    num_shared = 300 // page_size
    if prefix_cache:
        assert held_together < 2 * num_shared + 8 * (20 // page_size + 2)
        assert any(index < num_shared for plan in loop.plans[6:] for _, index, _ in plan.page_updates)
    else:
        assert held_together >= 8 * num_shared


def test_duplicates_are_freed_only_when_the_table_has_turned_away_and_no_step_reads_them() -> None:
    loop = StepLoop(make_limits(page_size=4, num_pages=20))
    prompt = list(range(8))
    loop.add(make_request("first", prompt))
    loop.add(make_request("second", prompt))
    first = loop.launch()  # both prompts at once
    pages_of = {row: [page for r, _, page in first.page_updates if r == row] for row in first.rows}
    kept, duplicates = pages_of[first.rows[0]], pages_of[first.rows[1]]
    decode = loop.launch()
    assert decode.page_updates == [(first.rows[0], 2, 4), (first.rows[1], 2, 5)]
    loop.commit()  # the prompts are published; the decode in flight still reads the duplicates
    assert not loop.free_pages.free_pages() & set(duplicates)
    repointing = loop.launch()
    assert repointing.page_updates == [(first.rows[1], 0, kept[0]), (first.rows[1], 1, kept[1])]
    assert not loop.free_pages.free_pages() & set(duplicates)
    loop.commit()  # the last step that read them
    assert loop.free_pages.free_pages() >= set(duplicates)
    loop.run()
    loop.check_outcomes()


@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
@pytest.mark.parametrize(("num_pages", "extra"), [(1, -1), (1, 0), (1, 1), (2, 0), (2, 1)])
def test_a_hit_leaves_at_least_one_token_to_compute(page_size: int, num_pages: int, extra: int) -> None:
    """B22: each prompt three times alone, then four times at once."""
    length = max(1, num_pages * page_size + extra)
    loop = StepLoop(make_limits(page_size=page_size, num_pages=64, max_model_len=600, max_num_batched_tokens=100))
    prompt = random_prompt(length, 3)
    for number in range(3):
        outcome = loop.add(make_request(f"alone{number}", prompt))
        loop.run()
        assert outcome.num_cached_tokens == ((length - 1) // page_size * page_size if number else 0)
    for number in range(4):
        loop.add(make_request(f"together{number}", prompt))
    loop.run()
    loop.check_outcomes()
    assert len({tuple(outcome.token_ids) for outcome in loop.outcomes.values()}) == 1
    assert loop.outcomes["together3"].num_cached_tokens == (length - 1) // page_size * page_size


def test_a_conversation_finds_its_own_answer() -> None:
    loop = StepLoop(make_limits())
    outcome = loop.add(make_request("turn1", range(10), max_tokens=11))
    loop.run()
    history = [*range(10), *outcome.token_ids]  # 21 tokens, of which 20 were computed
    second = loop.add(make_request("turn2", [*history, 1, 2, 3]))
    loop.run()
    loop.check_outcomes()
    assert second.num_cached_tokens == 20


def test_stats_count_lookups_and_hits() -> None:
    loop = StepLoop(make_limits())
    for name in ("a", "b"):
        loop.add(make_request(name, range(9), max_tokens=1))
        loop.run()
    stats = loop.scheduler.stats()
    assert (stats.num_prefix_tokens_queried, stats.num_prefix_tokens_hit) == (18, 8)
    assert (stats.num_cached_pages, stats.num_free_pages, stats.num_pages) == (2, 198, 200)
    loop.add(make_request("c", range(9), prompt_logprobs=1))
    loop.run()
    assert loop.scheduler.stats().num_prefix_tokens_queried == 18


def test_nothing_is_looked_up_with_the_cache_off() -> None:
    loop = StepLoop(make_limits(), prefix_cache=False)
    for name in ("a", "b"):
        assert loop.add(make_request(name, range(9), max_tokens=1)).num_deltas == 0
        loop.run()
    stats = loop.scheduler.stats()
    assert (stats.num_prefix_tokens_queried, stats.num_prefix_tokens_hit, stats.num_cached_pages) == (0, 0, 0)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_prompt_logprobs_come_once_and_whole(chunk: int, max_tokens: int) -> None:
    """Also on a prompt whose prefix is cached, and with ``max_tokens`` 0, which scores and samples nothing."""
    loop = StepLoop(make_limits(max_num_batched_tokens=chunk))
    for name in ("cold", "warm"):
        scored = loop.add(make_request(name, range(13), prompt_logprobs=0, logprobs=0, max_tokens=max_tokens))
        plain = loop.add(make_request(name + " plain", range(13), max_tokens=max_tokens))
        loop.run()
        assert scored.num_cached_tokens == 0
    loop.check_outcomes()  # compares the entries; Outcome.take checks that they come with the first delta
    assert scored.prompt_logprobs[0] is None
    assert [entry.token_id for entry in scored.prompt_logprobs[1:]] == list(range(1, 13))
    assert plain.num_cached_tokens == 12
    assert len(scored.token_ids) == max_tokens
    assert scored.finish_reason == "length"


def fails_first(prompt: list[int]) -> bool:
    """Return whether the double's model fails right after ``prompt``."""
    history = 0
    for token_id in prompt:
        history = digest(history, token_id)
    return fails(history, make_request("x", prompt, min_p=0.1).params)


def test_pages_of_a_failed_row_are_not_found_again() -> None:
    """Bad numbers in its keys and values would spread to all that share the prefix."""
    loop = StepLoop(make_limits(context_cost=0.2))
    prompt = next(p for p in (random_prompt(5, seed) for seed in range(1000)) if fails_first(p))
    chunked = loop.add(make_request("chunked", [1] * 190, max_tokens=1))
    loop.turn()
    failed = loop.add(make_request("failed", prompt, min_p=0.1))
    loop.run()
    loop.check_outcomes()
    # It stood behind a chunk that was not sampled, so its place among the sampled rows was another than in the plan.
    assert [False, True] in [plan.is_sampled for plan in loop.plans]
    assert failed.finish_reason == "error"
    assert failed.error == "sampling failed"
    assert chunked.finish_reason == "length"
    again = loop.add(make_request("again", prompt, max_tokens=1))
    repeated = loop.add(make_request("repeated", [1] * 190, max_tokens=1))
    loop.run()
    assert again.num_cached_tokens == 0
    assert repeated.num_cached_tokens == 188
