"""The real runner behind the facade: one engine on the demo model for the whole module."""

import asyncio
import math
import time

import pytest

from aserve.config import EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.request import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(runner, demo_files):
    config = EngineConfig(kv_memory_gib=0.25, max_num_seqs=8, max_num_batched_tokens=64, dtype="float32")
    engine = AsyncEngine(config)
    runner.run(engine.start())
    yield engine
    runner.run(engine.stop())


async def collect(engine, prompt, params):
    return [output async for output in engine.generate(prompt, params)]


def joined(outputs, name):
    return [item for output in outputs for item in getattr(output, name) or ()]


def test_a_chat_has_the_templates_tokens_and_ends_by_eos(runner, engine):
    outputs = runner.run(
        collect(engine, [{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=60))
    )
    last = outputs[-1]
    assert last.num_prompt_tokens == 31
    assert last.finish_reason is FinishReason.STOP
    assert joined(outputs, "token_ids")[-1] == 2
    text = "".join(output.text for output in outputs)
    assert "<|im_end|>" not in text
    assert text == engine.tokenizer.decode(joined(outputs, "token_ids"))


def test_logprobs_are_greedy_and_of_each_token(runner, engine):
    outputs = runner.run(
        collect(
            engine,
            "The capital of France is",
            SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2),
        )
    )
    entries = joined(outputs, "logprobs")
    assert [entry.token_id for entry in entries] == joined(outputs, "token_ids")
    for entry in entries:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))
        assert sum(math.exp(logprob) for _, logprob in entry.top) <= 1.0001
    prompt = engine.tokenizer.encode("The capital of France is")
    reported = outputs[0].prompt_logprobs
    assert reported[0] is None
    assert [entry.token_id for entry in reported[1:]] == prompt[1:]
    assert "Paris" in "".join(output.text for output in outputs)


def test_a_prompt_seen_before_is_found_and_gives_the_same(runner, engine):
    prompt = "In a village by the sea there lived a clockmaker who " * 3
    first = runner.run(collect(engine, prompt, GREEDY))
    again = runner.run(collect(engine, prompt, GREEDY))
    num_tokens, page_size = first[-1].num_prompt_tokens, engine.limits.page_size
    assert first[-1].num_cached_tokens == 0
    assert again[-1].num_cached_tokens == (num_tokens - 1) // page_size * page_size
    assert joined(first, "token_ids") == joined(again, "token_ids")


def test_a_prefix_hit_gives_the_same_log_probabilities(runner, engine):
    """B22: of the tokens after a prompt that is computed, and after the same prompt when it is found."""
    prompt = "The lighthouse keeper counted the ships that passed below, and wrote down for each of them " * 2
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5)
    first, again = (runner.run(collect(engine, prompt, params)) for _ in range(2))
    assert (first[-1].num_cached_tokens, again[-1].num_cached_tokens > 0) == (0, True)
    for one, other in zip(joined(first, "logprobs"), joined(again, "logprobs"), strict=True):
        assert one.token_id == other.token_id
        assert other.logprob == pytest.approx(one.logprob, abs=1e-3)
        tops = dict(one.top), dict(other.top)
        assert tops[1] == pytest.approx(tops[0], abs=1e-3)


def test_a_seed_gives_the_same_text_alone_and_among_neighbours(runner, engine):
    """B35: seven neighbours without a seed share its steps."""
    prompt = "Once upon a time there was a fox who"
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16, ignore_eos=True)
    free = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)

    async def run():
        alone = await collect(engine, prompt, seeded)
        unseeded = (collect(engine, f"{prompt} number {number}" * (1 + number % 3), free) for number in range(7))
        num_steps = engine.metrics.num_steps
        among, *others = await asyncio.gather(collect(engine, prompt, seeded), *unseeded)
        assert engine.metrics.num_steps - num_steps < 16 * 4  # they did share steps
        return ["".join(output.text for output in outputs) for outputs in (alone, among, *others)]

    alone, among, *others = runner.run(run())
    assert among == alone
    assert len({alone, *others}) == 8
    other_seed = runner.run(collect(engine, prompt, SamplingParams(seed=43, temperature=0.8, max_tokens=16)))
    assert "".join(output.text for output in other_seed) != alone


def test_leaving_early_frees_everything(runner, engine):
    async def leave():
        aborts = engine.stats().num_aborts
        stream = engine.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))
        async for output in stream:
            if output.num_output_tokens >= 3:
                break
        await stream.aclose()
        assert engine.stats().num_aborts == aborts + 1
        deadline = time.monotonic() + 10
        for _ in iter(lambda: engine.stats().scheduler.num_held_pages, 0):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        engine._steps.scheduler.check_integrity()

    runner.run(leave())


def test_together_each_gets_what_it_gets_alone(runner, engine):
    prompts = ["One plus one is", "The sky is", "def main():"]

    async def run():
        alone = [joined(await collect(engine, prompt, GREEDY), "token_ids") for prompt in prompts]
        together = await asyncio.gather(*(collect(engine, prompt, GREEDY) for prompt in prompts))
        assert [joined(outputs, "token_ids") for outputs in together] == alone

    runner.run(run())


@pytest.mark.alone
def test_the_loop_stays_responsive_while_the_model_computes(runner, engine):
    async def run():
        lags = []

        async def probe():
            while True:
                start = time.perf_counter()
                await asyncio.sleep(0.01)
                lags.append(time.perf_counter() - start - 0.01)

        task = asyncio.create_task(probe())
        prompts = [f"Story number {number}: " + "word " * 60 for number in range(3)]
        await asyncio.gather(*(collect(engine, prompt, GREEDY) for prompt in prompts))
        task.cancel()
        await asyncio.wait([task])
        lags.sort()
        step_s = engine.metrics.step_time.total / engine.metrics.step_time.num_observed
        assert len(lags) > 10
        # A loop that waited for the device would lag by a step every time.
        assert lags[len(lags) // 2] < step_s / 4

    runner.run(run())


def test_the_engines_own_numbers_add_up(engine):
    stats = engine.stats()
    assert (stats.num_open, stats.num_running, stats.num_waiting) == (0, 0, 0)
    text = engine.metrics.render().decode()
    assert f'aserve_request_success_total{{finished_reason="abort",model_name="{engine.model_name}"}} 1.0' in text
    assert engine.metrics.queue_time.num_observed == sum(engine.metrics.finished.values())
    assert stats.scheduler.num_prefix_tokens_hit > 0
