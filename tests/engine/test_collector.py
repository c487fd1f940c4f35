"""The one-slot sink: it merges, wakes its reader once, and keeps what came before a failure."""

import asyncio

import pytest
from doubles_engine import settle

from aserve.engine.collector import Collector
from aserve.errors import AserveError
from aserve.request import FinishReason, RequestOutput


def output(text, count, finish_reason=None):
    return RequestOutput("r", text, list(range(len(text))), 1, count, 0, finish_reason)


async def test_the_reader_gets_each_output_when_it_keeps_up():
    collector = Collector()
    reader = asyncio.create_task(collector.get())
    await settle(2)
    collector.put(output("a", 1))
    assert (await reader).text == "a"
    assert not collector.is_finished


async def test_a_slow_reader_gets_one_output_with_everything():
    collector = Collector()
    for number in range(1, 10_001):
        collector.put(output("a", number, FinishReason.LENGTH if number == 10_000 else None))
    merged = await collector.get()
    assert (merged.text, merged.num_output_tokens) == ("a" * 10_000, 10_000)
    assert merged.finish_reason is FinishReason.LENGTH
    assert collector.is_finished


async def test_what_came_before_a_failure_is_read_first():
    collector = Collector()
    collector.put(output("a", 1))
    collector.fail(AserveError("gone"))
    assert (await collector.get()).text == "a"
    for _ in range(2):
        with pytest.raises(AserveError, match="gone"):
            await collector.get()


async def test_a_cancelled_reader_leaves_the_output_for_the_next():
    collector = Collector()
    reader = asyncio.create_task(collector.get())
    await settle(2)
    collector.put(output("a", 1))
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()
    assert (await collector.get()).text == "a"
