"""What a token costs, in exact counts: one write for each frame, and no task is resumed for it."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest
from doubles_http import CUE, in_loop, live_server, raw_post

from aserve.server import serve
from aserve.server.http_protocol import HttpProtocol

STREAMS = 32


class CountingTransport:
    """Counts the writes to a connection."""

    writes = 0

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        CountingTransport.writes += 1
        self._transport.write(data)


class CountingApp:
    """Counts how often the tasks of requests are resumed."""

    resumes = 0

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await CountingCall(self._app(scope, receive, send))


class CountingCall:
    def __init__(self, call: Awaitable[None]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, None]:
        for step in self._call.__await__():
            CountingApp.resumes += 1
            yield step


async def read_chunks(live: Any, num_tokens: int) -> int:
    """Read one stream to its end and return the number of chunks in which the body came."""
    fields = {"prompt": [5, *CUE], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    async with raw_post(live, "/v1/completions", fields) as (reader, _):
        await reader.readuntil(b"\r\n\r\n")
        chunks = 0
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
            chunks += 1
        return chunks


@in_loop
async def run_streams(num_tokens: int, counts: list[tuple[int, int, int]]) -> None:
    CountingTransport.writes = CountingApp.resumes = 0
    async with live_server(lambda tokens, position: 300 + position % 4000, step_time_s=0.001) as live:
        chunks = await asyncio.gather(*(read_chunks(live, num_tokens) for _ in range(STREAMS)))
    counts.append((sum(chunks), CountingTransport.writes, CountingApp.resumes))


def test_one_write_a_frame_and_no_task_switch_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    made = HttpProtocol.connection_made
    monkeypatch.setattr(
        HttpProtocol, "connection_made", lambda self, transport: made(self, CountingTransport(transport))
    )
    create = serve.create_app
    monkeypatch.setattr(serve, "create_app", lambda *arguments: CountingApp(create(*arguments)))
    counts: list[tuple[int, int, int]] = []
    for num_tokens in (20, 200):
        run_streams(num_tokens, counts)
    for (chunks, writes, resumes), num_tokens in zip(counts, (20, 200), strict=True):
        assert chunks > STREAMS * num_tokens * 0.9  # some tokens are part of a character
        assert writes == chunks + 2 * STREAMS  # and the head and the end of each response
        assert resumes <= 4 * STREAMS
    assert counts[0][2] == counts[1][2]
