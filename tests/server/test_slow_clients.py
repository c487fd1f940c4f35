"""A client that does not read costs bounded memory, no other client's time, and is cut off after the deadline."""

import asyncio
import itertools
import json
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from doubles_engine import until
from doubles_http import CUE, Live, count_up, in_loop, live_server, raw_post

from aserve.server.stream_sink import StreamSink

LONG = {"max_tokens": 4000, "ignore_eos": True, "stream": True}


async def gaps(live: Live, num_events: int) -> list[float]:
    """Return the times between the events of a stream that is read at once."""
    times = []
    async with raw_post(live, "/v1/completions", {"prompt": [5, *CUE], **LONG}) as (reader, _):
        for _ in range(num_events):
            await reader.readuntil(b"data: ")
            times.append(time.monotonic())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def sinks(live: Live) -> list[StreamSink]:
    streams = live.engine._steps.streams.values()  # type: ignore[union-attr]
    return [stream.sink for stream in streams if isinstance(stream.sink, StreamSink)]


def cheap(tokens: Sequence[int], position: int) -> int:
    return 300 + position % 4000


def p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


async def disturbance(live: Live, alone: list[float]) -> float:
    """Return how much longer the longest gaps of a normal client are, beside the stalled ones."""
    together = await gaps(live, 100)
    assert statistics.median(together) < 1.5 * statistics.median(alone)
    return p99(together) / p99(alone)


@in_loop
async def test_stalled_readers_that_reset_their_connections_end_their_requests() -> None:
    async with live_server(cheap, step_time_s=0.005, stall_timeout_s=60.0) as live:
        async with AsyncExitStack() as stack:
            writers = []
            for _ in range(20):
                opened = raw_post(
                    live, "/v1/completions", {"prompt": [6, *CUE], "logprobs": 3, **LONG}, receive_buffer=4096
                )
                writers.append((await stack.enter_async_context(opened))[1])
            await until(lambda: sum(sink._pending is not None for sink in sinks(live)) == 20, 20)
            for writer in writers:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST instead of FIN
                writer.transport.abort()
            await until(lambda: live.engine.stats().num_aborts == 20)
            await live.until_idle()
        await live.check_alive()


@pytest.mark.alone
@in_loop
async def test_stalled_readers_are_cut_off_and_disturb_nobody() -> None:
    async with live_server(cheap, step_time_s=0.01, stall_timeout_s=6.0) as live:
        alone = await gaps(live, 100)
        await live.until_idle()
        tasks = len(asyncio.all_tasks())
        aborts = live.engine.stats().num_aborts
        async with AsyncExitStack() as stack:
            body = {"prompt": [6, *CUE], "logprobs": 3, **LONG}
            for _ in range(20):
                await stack.enter_async_context(raw_post(live, "/v1/completions", body, receive_buffer=4096))
            await until(lambda: sum(sink._pending is not None for sink in sinks(live)) == 20, 20)
            # The tail is at the mercy of a busy machine.
            assert min([await disturbance(live, alone) for _ in range(3)]) < 1.5
            await until(lambda: live.engine.stats().num_aborts == aborts + 23, 20)  # and the three that left
            await live.until_idle()
        await until(lambda: len(asyncio.all_tasks()) <= tasks)


@in_loop
async def test_what_waits_for_a_slow_reader_arrives_complete_and_merged() -> None:
    async with live_server(count_up, step_time_s=0.0) as live:
        body = {"prompt": [6, *CUE], "stream_options": {"include_usage": True}, **LONG, "max_tokens": 3000}
        async with raw_post(live, "/v1/completions", body, receive_buffer=4096) as (reader, _):
            await until(lambda: live.engine.stats().num_open == 1)
            await until(lambda: live.engine.stats().num_open == 0, 60)  # all generated, most of it not read
            text = b""
            while b"[DONE]" not in text:
                text += await reader.read(65536)
        assert b'"completion_tokens":3000' in text
        assert text.count(b"data: ") < 3000
        plain = (await live.complete([6, *CUE], **{**LONG, "stream": False, "max_tokens": 3000})).json()
        lines = [line for line in text.split(b"\n") if line.startswith(b"data: {")]
        assert len(lines) > 3
        joined = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
        assert joined == plain["choices"][0]["text"]
