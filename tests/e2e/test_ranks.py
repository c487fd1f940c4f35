"""The demo model on two ranks of a CPU: transformers' tokens, and grammars that every rank follows by itself."""

import asyncio
import re
from typing import Any

import pytest
from doubles_demo_engine import MakeEngine, complete_all, in_loop, settled_stats, tokens_of
from doubles_greedy import NUM_TOKENS, Reference
from reference.margins import check_greedy

from aserve.request import GrammarSpec, SamplingParams

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PATTERN = r"[A-Z][a-z]{1,8}( [a-z]{1,8}){0,5}[.!?]"


@in_loop
async def test_greedy_tokens_equal_transformers(make_engine: MakeEngine, reference: Reference) -> None:
    longest = max(len(prompt["prompt_token_ids"]) for prompt in reference) + NUM_TOKENS
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "decode_context_parallel_size": 2,
        "page_size": 8,
        "max_num_batched_tokens": 128,
        "max_model_len": longest + 1,
        "num_pages": 3 * longest // 16,  # not all sequences find room at once
    }
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    grammar = SamplingParams(temperature=1.0, seed=3, max_tokens=60, grammar=GrammarSpec("regex", PATTERN))
    async with make_engine(**settings) as engine:
        structured = asyncio.create_task(engine.complete("Say something.", grammar))
        outputs = await complete_all(engine, [prompt["prompt_token_ids"] for prompt in reference], params)
        assert re.fullmatch(PATTERN, (await structured).text)
        stats = await settled_stats(engine)
    check_greedy(reference, tokens_of(outputs))
    assert stats.num_preemptions > 0
    assert stats.num_prefix_tokens_hit > 0
