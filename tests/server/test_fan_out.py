"""What a token costs between the engine and the socket: exact counts, and time as a ratio to the floor beside it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from doubles_socket import ServedTokenizer, in_loop, receive_until, scripted_server, send

from aserve.bench.fan_out import measure_frames

NUM_STREAMS = 64
NUM_TOKENS = 50


class CountingTransport:
    """Counts the writes to a real transport."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.num_writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.num_writes += 1
        self._transport.write(data)


class CountingCoroutine(Coroutine[Any, Any, Any]):
    """Counts how often its task is run."""

    num_switches = 0

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        CountingCoroutine.num_switches += 1
        return self._coroutine.send(value)

    def throw(self, *args: Any) -> Any:
        return self._coroutine.throw(*args)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


@in_loop
async def test_a_frame_is_one_write_and_a_token_switches_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.get_running_loop().set_task_factory(
        lambda loop, coroutine, **kwargs: asyncio.Task(CountingCoroutine(coroutine), loop=loop, **kwargs)
    )
    monkeypatch.setattr(CountingCoroutine, "num_switches", 0)
    async with scripted_server(lambda tokens, position: 97, step_time_s=None) as live:
        runner = live.engine._parts.runner
        connections = [await live.connect(ping_interval=None) for _ in range(NUM_STREAMS)]
        for connection in connections:
            await send(connection, input="count", max_output_tokens=NUM_TOKENS + 10)
        readers = [asyncio.create_task(receive_until(connection, "response.in_progress")) for connection in connections]
        await asyncio.gather(*readers)
        while not runner.launched:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await run_steps(live, 4)  # all are decoding, their messages are open

        counters = [CountingTransport(protocol.transport) for protocol in live.protocols]
        for protocol, counter in zip(live.protocols, counters, strict=True):
            protocol.transport = counter  # type: ignore[assignment]
        for connection in connections:
            connection.transport.pause_reading()  # its own task must not be counted
        before = CountingCoroutine.num_switches
        await run_steps(live, NUM_TOKENS)
        num_switches = CountingCoroutine.num_switches - before

        assert [counter.num_writes for counter in counters] == [NUM_TOKENS] * NUM_STREAMS
        # The step loop gives way a few times a step, whatever the number of tokens.
        assert num_switches < NUM_TOKENS * 30 < NUM_TOKENS * NUM_STREAMS
        for connection in connections:
            connection.transport.abort()
        await live.lose_connections()
        becoming_idle = asyncio.create_task(live.become_idle())
        while not becoming_idle.done():  # a step may still be launched before the loop learns that nobody is left
            while runner.launched:
                runner.complete_next()
            await asyncio.sleep(0.001)
        await becoming_idle


async def run_steps(live: Any, count: int) -> None:
    """Complete steps one by one; each is delivered, and the next one launched, before the next completes."""
    runner, metrics = live.engine._parts.runner, live.engine.metrics
    for _ in range(count):
        rows = len(runner.launched[0].plan.rows)
        wanted = metrics.num_generation_tokens + rows
        runner.complete_next()
        while metrics.num_generation_tokens < wanted or not runner.launched:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.alone
@in_loop
async def test_the_way_through_the_sink_costs_less_than_twice_the_bare_write() -> None:
    """Machines differ in how quick the bare write is: the ratio of the same code was seen from 1.2 to 1.65."""
    costs = await measure_frames(ServedTokenizer(), 256, num_rounds=10, num_repeats=7, with_plain=False)
    assert costs.ratio_to_floor("sink") < 2, costs.by_way


@pytest.mark.alone
@pytest.mark.full
@in_loop
async def test_the_way_through_the_sink_costs_little_more_than_the_bare_write() -> None:
    costs = await measure_frames(ServedTokenizer(), 256, num_rounds=10, num_repeats=21, with_plain=False)
    assert costs.ratio_to_floor("sink") < 1.6, costs.by_way
