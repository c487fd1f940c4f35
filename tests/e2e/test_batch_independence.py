"""With int8 weights on a CPU what a prompt gives depends on nothing beside it, nor on how its batch cut it."""

import asyncio

from doubles_demo_engine import MakeEngine, complete_all

from aserve.engine.async_engine import AsyncEngine
from aserve.request import RequestOutput, SamplingParams

STEP = 64  # tokens
SHORT, LONG = 20, 321  # the last chunk of the long one has 1 token alone, and SHORT more beside the short one
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)


async def complete(engine: AsyncEngine) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Return what each prompt gives alone and what they give at once."""
    prompts = [[100 + 7 * (start + place) for place in range(length)] for start, length in enumerate((SHORT, LONG))]
    async with engine:
        alone = [(await complete_all(engine, [prompt], PARAMS))[0] for prompt in prompts]
        together = await complete_all(engine, prompts, PARAMS)
    return alone, together


def test_log_probabilities_are_those_of_a_prompt_alone(make_engine: MakeEngine) -> None:
    """To the bit: a difference in the last one decides how an activation is rounded to 8 bits, and grows to tenths."""
    settings = {"device": "cpu", "dtype": "float32", "quantization": "int8", "num_threads": 1, "prefix_cache": False}
    alone, together = asyncio.run(complete(make_engine(**settings, max_num_batched_tokens=STEP)))
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.logprobs for output in together] == [output.logprobs for output in alone]
