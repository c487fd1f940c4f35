"""Ways to run the same prompts greedily, each of which must give transformers' tokens (invariant 8).

The reference is committed (tests/reference), made by transformers from the same GGUF weights in fp32; its margins say
which tokens are clear.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from doubles_demo_engine import MakeEngine
from reference.margins import check_greedy

from aserve.engine.async_engine import AsyncEngine
from aserve.request import SamplingParams
from aserve.scheduler.stats import SchedulerStats

Reference = list[dict[str, Any]]
NUM_TOKENS = 64  # after each prompt


@dataclass(frozen=True)
class Case:
    """One way to run the same prompts; the defaults are the base of the single factors."""

    batched: bool = True
    prefix_cache: bool = True
    chunk: int = 4096  # max_num_batched_tokens
    page_size: int = 16
    overlap: bool = True
    small_pool: bool = False
    backend: str = "auto"
    speculation: str = "none"

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(changed) or "base"

    def settings(self, longest: int) -> dict[str, Any]:
        """The pool of a small case holds the longest sequence and little more."""
        pool_tokens = longest * 2 if self.small_pool else 32 * longest
        return {
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": self.backend,
            "speculation": self.speculation,
            "prefix_cache": self.prefix_cache,
            "max_num_batched_tokens": self.chunk,
            "page_size": self.page_size,
            "overlap": self.overlap,
            "num_pages": -(-pool_tokens // self.page_size) + 1,
            "max_model_len": longest + 1,
        }


FACTORS: dict[str, tuple[Any, ...]] = {
    "batched": (True, False),
    "prefix_cache": (True, False),
    "chunk": (4096, 64, 7),
    "page_size": (16, 1),
    "overlap": (True, False),
    "small_pool": (False, True),
    "backend": ("auto", "torch"),
}


def single_factors() -> Iterator[Case]:
    """The base, then each other value of each factor alone; and the cache off where it is hit with it on."""
    yield Case()
    for name, (_, *others) in FACTORS.items():
        yield from (Case(**{name: value}) for value in others)
    yield Case(prefix_cache=False, chunk=64)


def grid() -> list[Case]:
    """Every combination; a single sequence never runs out of pages, so the small pool is for batches only."""
    cases = [Case(**dict(zip(FACTORS, values, strict=True))) for values in itertools.product(*FACTORS.values())]
    return [case for case in cases if case.batched or not case.small_pool]


def random_combinations(count: int) -> list[Case]:
    """The same few combinations each time; single sequences, tiny chunks and preemption would take minutes."""
    alone = set(single_factors())
    quick = [case for case in grid() if case.batched and case.chunk >= 64 and not case.small_pool and case not in alone]
    return random.Random(7).sample(quick, count)


def prompts_for_fast_tests(case: Case, reference: Reference) -> Reference:
    """All for the base; for the others, which the whole grid runs on all, the last ones, which share beginnings."""
    if case == Case():
        return reference
    share = 2 if case.batched and case.chunk >= 64 else 4  # single sequences and tiny chunks take longest
    return reference[-len(reference) // share :]


def check(case: Case, make_engine: MakeEngine, reference: Reference) -> None:
    """Run all prompts and compare by the margin rule."""
    assert {len(prompt["output_token_ids"]) for prompt in reference} == {NUM_TOKENS}
    outputs, stats = asyncio.run(complete(case, make_engine, reference))
    assert bool(stats.num_preemptions) == case.small_pool, "preemption is what the small pool is for"
    if not case.small_pool and (not case.batched or case.chunk < 4096):  # else all prompts start in one step
        assert bool(stats.num_prefix_tokens_hit) == case.prefix_cache, "the prompts share beginnings"
    assert bool(stats.num_accepted_tokens) == (case.speculation != "none")
    assert {len(output) for output in outputs} == {NUM_TOKENS}
    check_greedy(reference, outputs)


async def complete(case: Case, make_engine: MakeEngine, reference: Reference) -> tuple[list[list[int]], SchedulerStats]:
    """Return the tokens of each prompt and the counts at the end."""
    longest = max(len(prompt["prompt_token_ids"]) for prompt in reference) + NUM_TOKENS
    async with make_engine(**case.settings(longest)) as engine:
        prompts = [prompt["prompt_token_ids"] for prompt in reference]
        if case.batched:
            outputs = await asyncio.gather(*(one(engine, prompt) for prompt in prompts))
        else:
            outputs = [await one(engine, prompt) for prompt in prompts]
        return list(outputs), engine.stats().scheduler


async def one(engine: AsyncEngine, prompt: list[int]) -> list[int]:
    """Return its greedy tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return (await engine.complete(prompt, params)).token_ids
