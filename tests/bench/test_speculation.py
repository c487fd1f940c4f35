"""The comparison with and without drafts, on scripted engines whose text is known."""

import argparse
import asyncio

from doubles_engine import LIMITS, running_engine, speak

from aserve.bench import speculation
from aserve.runner.scripted import ScriptedRunner

ARGUMENTS = argparse.Namespace(max_tokens=60, rounds=2)


def compare(*scripts, streams=2):
    async def run():
        runners = [ScriptedRunner(LIMITS, script) for script in scripts]
        async with running_engine(runners[0]) as plain, running_engine(runners[1], speculation="ngram") as drafted:
            return await speculation.compare([plain, drafted], "copy", streams, ARGUMENTS)

    return asyncio.run(run())


def test_a_row_says_how_fast_how_many_were_right_and_whether_the_tokens_are_the_same(monkeypatch):
    monkeypatch.setitem(speculation.PROMPTS, "copy", ["abc"])
    row = compare(*[speak("abcd" * 13 + "efgh" * 2, 4)] * 2, streams=1)  # two may need a step more each
    assert (row["text"], row["streams"], row["same tokens"]) == ("copy", 1, True)
    assert row["ratio of tok/s"] > 0
    assert row["steps with"] < row["steps without"] / 2
    assert row["with tok/s"] > 0
    assert 0 < row["accepted"] < 1, "what breaks off"


def test_other_tokens_show(monkeypatch):
    monkeypatch.setitem(speculation.PROMPTS, "copy", ["abc"])
    assert compare(speak("abcd" * 20, 4), speak("abce" * 20, 4))["same tokens"] is False
