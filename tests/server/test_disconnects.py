"""Clients that leave: their work ends at once, wherever it stands, and nothing else is ever aborted."""

import asyncio
import gc
import json
import socket
import struct
from collections import Counter
from collections.abc import Callable

import httpx
import pytest
from doubles_engine import until
from doubles_http import CUE, LIMITS, Live, count_up, events, fetch, in_loop, live_server, raw_post, say

LONG = {"max_tokens": 4000, "ignore_eos": True}


async def leave_after(live: Live, path: str, num_lines: int, **fields: object) -> None:
    """Read that many events, then close the socket."""
    async with raw_post(live, path, {"stream": True, **LONG, **fields}) as (reader, _):
        for _ in range(num_lines):
            await reader.readuntil(b"data: ")


@pytest.mark.parametrize("num_chunks", [0, 1, 5])
@in_loop
async def test_streams_that_are_left_end_within_a_second(num_chunks: int) -> None:
    async with live_server(step_time_s=0.002) as live:
        await asyncio.gather(
            *(leave_after(live, "/v1/completions", num_chunks, prompt=[5 + i, *CUE]) for i in range(50))
        )
        await live.until_idle()
        assert live.engine.stats().num_aborts == 50 if num_chunks else live.engine.stats().num_aborts <= 50
        await live.check_alive()


@in_loop
async def test_streams_that_are_read_to_the_end_are_never_aborted() -> None:
    async with live_server(say("one two three")) as live:
        body = {"prompt": [5, *CUE], "stream": True}
        texts = await asyncio.gather(*(fetch(live, "/v1/completions", **body) for _ in range(50)))
        assert all(events(text) for text in texts)
        await live.until_idle()
        assert live.engine.stats().num_aborts == 0


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_queued_request_ends_when_its_client_leaves(stream: bool) -> None:
    limits = type(LIMITS)(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"max_num_seqs": 1})
    async with (
        live_server(limits=limits, step_time_s=0.002) as live,
        raw_post(live, "/v1/completions", {"prompt": [5, *CUE], "stream": True, **LONG}) as (reader, _),
    ):
        await reader.readuntil(b"data: ")
        async with raw_post(live, "/v1/completions", {"prompt": [6, *CUE], "stream": stream, **LONG}):
            await until(lambda: live.engine.stats().num_waiting == 1)
        await until(lambda: live.engine.stats().num_waiting == 0)
        assert live.engine.stats().num_running == 1
        assert live.engine.stats().num_aborts == 1


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_request_in_the_middle_of_its_prompt_ends_when_its_client_leaves(stream: bool) -> None:
    async with live_server(step_time_s=0.1) as live:
        prompt = [5] * 8000  # sixteen steps
        async with raw_post(live, "/v1/completions", {"prompt": prompt, "stream": stream}):
            await until(lambda: live.runner.num_launched > 2)
        await live.until_idle()
        assert live.runner.num_launched < 10
        assert live.engine.metrics.num_generation_tokens == 0


def reset(sock: socket.socket) -> None:
    """Let closing ``sock`` send RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("how", [None, reset])
@in_loop
async def test_a_request_without_a_stream_ends_when_its_client_leaves(
    how: Callable[[socket.socket], None] | None,
) -> None:
    async with live_server(step_time_s=0.002) as live:
        async with raw_post(live, "/v1/completions", {"prompt": [5, *CUE], "n": 3, **LONG}) as (_, writer):
            await until(lambda: live.engine.stats().num_running == 3)
            if how:
                how(writer.get_extra_info("socket"))
        await live.until_idle()
        assert live.engine.stats().num_aborts == 3
        await live.check_alive()


@in_loop
async def test_a_client_with_a_large_body_that_leaves_is_noticed() -> None:
    body = json.dumps({"prompt": [5] * 8000, "stream": True}).encode().ljust(200_000)
    async with live_server(step_time_s=0.2) as live:  # sixteen steps without a token, so no write finds the peer gone
        reader, writer = await asyncio.open_connection(*live.address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n")
        await asyncio.sleep(0.1)  # the endpoint waits for the body, all of which then comes at once and pauses reading
        writer.write(body)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await live.until_idle()
        assert live.engine.stats().num_aborts == 1


@in_loop
async def test_a_pipelining_client_that_leaves_ends_the_request_in_front() -> None:
    async with live_server(step_time_s=0.002) as live:
        async with raw_post(live, "/v1/completions", {"prompt": [5, *CUE], **LONG}) as (_, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n" * 2)
            await until(lambda: live.engine.stats().num_running == 1)
            reset(writer.get_extra_info("socket"))
        # Reading is paused while a pipelined request waits; a stream's next frames find the peer gone.
        async with raw_post(live, "/v1/completions", {"prompt": [5, *CUE], "stream": True, **LONG}) as (_, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n" * 2)
            await until(lambda: live.engine.stats().num_running >= 1)
            reset(writer.get_extra_info("socket"))
        await live.until_idle()


@in_loop
async def test_no_entry_stays_behind_of_a_thousand_short_requests() -> None:
    async with live_server(count_up) as live:
        for _ in range(10):
            await asyncio.gather(*(short(live, i) for i in range(100)))
        await live.until_idle()
        assert live.state._connections == set()
        assert live.engine.stats().num_aborts == 0


async def short(live: Live, seed: int) -> None:
    async with raw_post(live, "/v1/completions", {"prompt": [5 + seed, *CUE], "max_tokens": 2}) as (reader, _):
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"}}}")


@in_loop
async def test_responses_on_one_connection_follow_one_another() -> None:
    async with live_server(say("ok")) as live:
        body = b'{"prompt":[5,9531,198],"stream":true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % len(body)
        reader, writer = await asyncio.open_connection(*live.address)
        writer.write((head + body) * 3)  # pipelined
        for _ in range(3):
            assert b" 200 " in await reader.readline()
            answer = await reader.readuntil(b"0\r\n\r\n")
            assert answer.count(b"[DONE]") == 1
            assert b'"text":"ok"' in answer
        writer.close()
        await live.until_idle()
        assert live.engine.stats().num_aborts == 0


KEPT = ("BodyTransport", "RequestResponseCycle", "Generation", "StreamSink", "Outlet")


def count_kept() -> dict[str, int]:
    """Count what belongs to single requests, collected or not."""
    return dict(Counter(name for one in gc.get_objects() if (name := type(one).__name__) in (*KEPT, "HttpProtocol")))


@in_loop
async def test_an_answered_request_is_freed_without_the_garbage_collector() -> None:
    async with live_server(say("one two three")) as live:
        gc.collect()
        gc.disable()
        try:
            async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
                for _ in range(5):
                    for fields in ({"stream": True}, {"stream": False}, {"model": "x"}):
                        body = {"prompt": [5, *CUE], "n": 2, **fields}
                        await client.post("/v1/completions", json=body)
                    await client.get("/health")
                # On the open connection the last request waits for the next one to take its place.
                await until(lambda: max(count_kept().values()) == 1)
            body = {"prompt": [5] * 8000, "max_tokens": 8000, "ignore_eos": True}
            for stream in (False, True):
                async with raw_post(live, "/v1/completions", {**body, "stream": stream}):
                    await until(lambda: live.engine.stats().num_open == 1)
                await live.until_idle()
            await until(lambda: not count_kept())
        finally:
            gc.enable()
