"""Grammars on a GPU: what has one matches it, and its neighbours in the batch keep transformers' tokens."""

import asyncio
import json
from typing import Any

import pytest
import regex
from doubles_demo_engine import EXACT, MakeEngine, complete_all, in_loop, settled_stats, tokens_of
from reference.margins import check_greedy, read_reference

from aserve.request import FinishReason, GrammarSpec, RequestOutput, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PATTERN = r"[A-Z][a-z]{1,8}( [a-z]{1,8}){0,5}[.!?]"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def drawn(kind: str, text: str, seed: int) -> SamplingParams:
    """Random output that a grammar holds."""
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=160, grammar=GrammarSpec(kind, text))


def check_pattern(output: RequestOutput) -> None:
    is_whole = output.finish_reason is FinishReason.STOP
    assert regex.fullmatch(PATTERN, output.text, partial=not is_whole), output.text


def check_schema(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.STOP:
        made = json.loads(output.text)
        assert list(made) == ["name", "age", "tags"]
        assert isinstance(made["name"], str)
        assert len(made["name"]) <= 12
        assert type(made["age"]) is int
        assert 0 <= made["age"] <= 150
        assert set(made["tags"]) <= {"red", "green", "blue"}
        assert len(made["tags"]) <= 4


@in_loop
@pytest.mark.parametrize(
    "settings",
    [
        EXACT,
        EXACT | {"overlap": False, "cuda_graphs": False},
        {"dtype": "bfloat16", "attention_backend": "fi"},
    ],
    ids=["exact", "exact, eager, no overlap", "fi"],
)
async def test_grammars_hold_and_disturb_nobody(make_engine: MakeEngine, settings: dict[str, Any]) -> None:
    prompts = read_reference("short_reference.json")[:48]
    ids = [prompt["prompt_token_ids"] for prompt in prompts]
    async with make_engine(**settings | {"num_pages": 4096, "max_num_seqs": 96}) as engine:
        patterns, schemas, free = await asyncio.gather(
            complete_all(engine, ids[:16], [drawn("regex", PATTERN, seed) for seed in range(16)]),
            complete_all(engine, ids[16:32], [drawn("json_schema", json.dumps(SCHEMA), seed) for seed in range(16)]),
            complete_all(engine, ids, GREEDY),
        )
        await settled_stats(engine)
    for output in patterns:
        check_pattern(output)
    for output in schemas:
        check_schema(output)
    assert sum(output.finish_reason is FinishReason.STOP for output in [*patterns, *schemas]) >= 24
    assert len({output.text for output in [*patterns, *schemas]}) >= 24  # drawn, not forced
    if settings["dtype"] == "float32":
        check_greedy(prompts, tokens_of(free))
