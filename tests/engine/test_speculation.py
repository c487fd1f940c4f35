"""Whole engines with drafts on a scripted device: the same outputs, fewer steps, and a trace that replays."""

import asyncio
import dataclasses
import functools
import random

import orjson
import pytest
from doubles_engine import EOS, LIMITS, CheckedRunner, letters, running_engine, speak, until

from aserve.engine.replay import replay_file
from aserve.request import GrammarSpec, SamplingParams

NGRAM = {"speculation": "ngram", "num_speculative_tokens": 6}


def loopy(tokens, position, length=13):
    """Repeat what stood seven tokens before, but for a letter in each ``length``; end at last."""
    if position % 97 == 0:
        return EOS
    return letters(tokens, position) if position % length == 0 or position < 7 else tokens[position - 7]


async def complete(prompt, params, script=loopy, **settings):
    """Return the output of one request alone, and the number of steps that it took."""
    async with running_engine(CheckedRunner(LIMITS, script), **settings) as engine:
        output = await engine.complete(prompt, params)
        await until(lambda: not engine.stats().scheduler.num_in_flight)
        return output, engine.metrics.num_steps


@pytest.mark.parametrize("overlap", [True, False])
async def test_text_that_repeats_takes_fewer_steps(overlap):
    params = SamplingParams(max_tokens=80, temperature=0.0)
    script = functools.partial(loopy, length=20)
    outputs, steps = zip(
        *[await complete("abcdefgh", params, script, overlap=overlap, **settings) for settings in ({}, NGRAM)],
        strict=True,
    )
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].text == outputs[1].text
    assert outputs[0].num_output_tokens == outputs[1].num_output_tokens == 80
    assert steps[1] < steps[0] / 2


async def test_acceptance_is_exported():
    async with running_engine(CheckedRunner(LIMITS, speak("abcabcabcabcabcabcabc", 3)), **NGRAM) as engine:
        await engine.complete("xyz", SamplingParams(max_tokens=30))
        await until(lambda: not engine.stats().scheduler.num_in_flight)
        stats, page = engine.stats().scheduler, engine.metrics.render().decode()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for name, count in (("draft", stats.num_draft_tokens), ("accepted", stats.num_accepted_tokens)):
        assert f'aserve_spec_decode_num_{name}_tokens_total{{model_name="scripted"}} {float(count)}' in page


@pytest.mark.parametrize("stop", ["cab", "bca", "a", "abcab"])
async def test_a_stop_string_ends_the_text_within_a_draft(stop):
    params = SamplingParams(max_tokens=60, stop=(stop,), min_tokens=20)
    results = [(await complete("xyz", params, speak("abc" * 30, 3), **settings))[0] for settings in ({}, NGRAM)]
    assert results[0].text == results[1].text
    assert results[0].token_ids == results[1].token_ids
    assert {result.finish_reason for result in results} == {"stop"}
    assert {result.stop_reason for result in results} == {stop}


async def test_log_probabilities_come_for_each_token_of_a_draft():
    params = SamplingParams(max_tokens=40, logprobs=1)
    results = [(await complete("abcabc", params, **settings))[0] for settings in ({}, NGRAM)]
    assert [entry.token_id for entry in results[1].logprobs] == results[1].token_ids
    assert results[0].logprobs == results[1].logprobs


@pytest.mark.parametrize("changes", [{"presence_penalty": 0.1}, {"grammar": GrammarSpec("regex", "[a-z]*")}])
async def test_rows_that_look_back_are_not_drafted_for(changes):
    async with running_engine(CheckedRunner(LIMITS, speak("abc" * 20, 3)), **NGRAM) as engine:
        engine.prepare = lambda params: asyncio.sleep(0)  # the scripted device follows no grammar
        await engine.complete("xyz", SamplingParams(max_tokens=30, **changes))
        assert engine.stats().scheduler.num_draft_tokens == 0


async def crowd(path, **settings):
    """Run forty requests of all kinds in a pool that is too small, some of which leave early; return what each got."""
    rng = random.Random(1)
    limits = dataclasses.replace(LIMITS, num_pages=60, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=120)
    results = {}

    async def one(number):
        prompt = "".join(rng.choice("abc") for _ in range(rng.randint(1, 30)))
        params = SamplingParams(
            max_tokens=rng.randint(1, 60),
            stop=rng.choice(((), (), ("ab",))),
            logprobs=rng.choice((None, 1)),
            presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.5)),
        )
        num_wanted = rng.choice((1000, 1000, 5))
        tokens = []
        stream = engine.generate(prompt, params, priority=number % 3)
        async for output in stream:
            tokens += output.token_ids
            if len(tokens) >= num_wanted:
                break
        await stream.aclose()
        results[number] = tokens[:num_wanted]

    async with running_engine(CheckedRunner(limits, loopy), trace_steps=40, **settings) as engine:
        for _ in range(3):  # idle in between, so that the trace may start with a picture
            await asyncio.gather(*map(one, range(40)))
            await until(lambda: not engine.stats().scheduler.num_in_flight)
        engine.dump_trace(path)
        return results, engine.stats().scheduler


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_crowd_gets_the_same_with_drafts_and_its_trace_replays(tmp_path, overlap):
    path = tmp_path / "trace.jsonl"
    expected, _ = await crowd(path, overlap=overlap)
    results, stats = await crowd(path, overlap=overlap, **NGRAM)
    assert results == expected
    assert stats.num_accepted_tokens > 100
    assert stats.num_preemptions > 0
    report = replay_file(path)
    assert report.is_equal, str(report)
    assert report.num_aborts > 0
    assert orjson.loads(path.read_bytes().splitlines()[0])["scheduler"] is not None
    path.write_bytes(b"\n".join(without_first_draft(path.read_bytes().splitlines())))
    assert "drafts is" in str(replay_file(path))


def without_first_draft(lines):
    """Change what was planned: the replay must notice."""
    is_changed = False
    for line in map(orjson.loads, lines):
        if not is_changed and line.get("plan") and line["plan"].get("drafts"):
            line["plan"]["drafts"][0][0] += 1
            is_changed = True
        yield orjson.dumps(line)
