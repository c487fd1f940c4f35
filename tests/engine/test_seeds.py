"""A sampled token depends on its logits, seed and position alone (case B35), on logits from a script."""

import asyncio
import math

import pytest
from doubles_engine import CheckedRunner, running_engine

from aserve.request import SamplingParams
from aserve.scheduler.limits import Limits

ROOMY = Limits(
    vocab_size=256, max_model_len=128, max_num_seqs=32, max_num_batched_tokens=64, num_pages=512, page_size=4
)
TIGHT = Limits(vocab_size=256, max_model_len=128, max_num_seqs=32, max_num_batched_tokens=64, num_pages=40, page_size=4)
SEEDED = SamplingParams(seed=42, temperature=0.8, max_tokens=32, ignore_eos=True)


def wavy(tokens, position):
    """Logits over a few letters that depend on the last two tokens."""
    key = tokens[position - 1] * 7 + tokens[position - 2] * 3
    return [-math.inf] * 97 + [2 * math.sin(key + 5 * letter) for letter in range(12)]


async def text_of(engine, prompt, params):
    return "".join([output.text async for output in engine.generate(prompt, params)])


async def seeded_text(limits, num_neighbours, overlap):
    async with running_engine(CheckedRunner(limits, wavy), overlap=overlap) as engine:
        neighbours = [
            asyncio.create_task(text_of(engine, "ab" + chr(97 + number), SamplingParams(max_tokens=40)))
            for number in range(num_neighbours)
        ]
        for _ in range(num_neighbours):
            await asyncio.sleep(0)
        text = await text_of(engine, "abc", SEEDED)
        await asyncio.gather(*neighbours)
        return text, engine.stats().scheduler.num_preemptions


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_seeded_text_is_the_same_in_any_company(overlap):
    alone, _ = await seeded_text(ROOMY, 0, overlap)
    assert len(set(alone)) > 3
    for num_neighbours in (1, 7, 31):
        assert (await seeded_text(ROOMY, num_neighbours, overlap))[0] == alone


async def test_preemption_changes_nothing():
    alone, _ = await seeded_text(ROOMY, 0, True)
    text, num_preemptions = await seeded_text(TIGHT, 31, True)
    assert num_preemptions > 0
    assert text == alone


async def test_without_a_seed_runs_differ():
    async with running_engine(CheckedRunner(ROOMY, wavy)) as engine:
        params = SamplingParams(max_tokens=32)
        one_by_one = [await text_of(engine, "abc", params) for _ in range(5)]
        together = await asyncio.gather(*(text_of(engine, "abc", params) for _ in range(5)))
    assert len(set(one_by_one)) > 1
    assert len(set(together)) > 1


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 - 1])
async def test_seeds_at_the_edges_work_and_repeat(seed):
    async with running_engine(CheckedRunner(ROOMY, wavy)) as engine:
        params = SamplingParams(seed=seed, max_tokens=16)
        assert await text_of(engine, "abc", params) == await text_of(engine, "abc", params)
