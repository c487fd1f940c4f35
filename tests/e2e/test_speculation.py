"""Drafts on the demo model: what comes out is what comes out without, to the bit on a CPU, and transformers' tokens."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest
from doubles_demo_engine import MakeEngine
from doubles_greedy import Case, Reference, check

from aserve.engine.async_engine import AsyncEngine
from aserve.request import RequestOutput, SamplingParams

COPY = "Repeat this word for word: Monday: bread, milk and two apples. Tuesday: bread, milk and two pears."
SMALL: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "quantization": "int8", "num_threads": 1, "max_num_batched_tokens": 64,
}  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=28, logprobs=1),
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=28, seed=4, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=16, repetition_penalty=1.1),  # has no drafts, but neighbours that do
]


async def complete(engine: AsyncEngine) -> list[RequestOutput]:
    """Run the requests together, so that rows with drafts and without share steps; which ones, no clock decides."""
    async with engine:
        prompt = await engine.encode([{"role": "user", "content": COPY}])
        outputs = await asyncio.gather(*(engine.complete(prompt, params) for params in PARAMS))
        stats = engine.stats().scheduler
    assert (stats.num_accepted_tokens > 10) == (engine.config.speculation == "ngram")
    return list(outputs)


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_and_log_probabilities_are_those_without_drafts(make_engine: MakeEngine, overlap: bool) -> None:
    plain = asyncio.run(complete(make_engine(**SMALL, overlap=overlap)))
    drafted = asyncio.run(complete(make_engine(**SMALL, overlap=overlap, speculation="ngram", page_size=4)))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert [output.text for output in drafted] == [output.text for output in plain]
    assert [output.logprobs for output in drafted] == [output.logprobs for output in plain]


GRID = [
    replace(Case(), **dict(zip(("chunk", "page_size", "overlap", "small_pool", "backend"), values, strict=True)))
    for values in itertools.product((4096, 64), (16, 1), (True, False), (False, True), ("auto", "torch"))
]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_greedy_tokens_equal_transformers(case: Case, make_engine: MakeEngine, reference: Reference) -> None:
    check(replace(case, speculation="ngram"), make_engine, reference)
