"""The WebSocket protocol's direct frames, against the ``websockets`` library on the other side."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from doubles_socket import in_loop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import NegotiationError
from websockets.frames import Frame, Opcode

from aserve.server.http_protocol import HttpProtocol
from aserve.server.responses.endpoints import select_protocol
from aserve.server.transport import EXTENSION
from aserve.server.ws_protocol import WebSocketProtocol, text_frame_header


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65535, 65536, 65537, 1 << 20])
def test_the_header_is_that_of_the_websockets_library(size: int) -> None:
    payload = b"x" * size
    assert text_frame_header(size) + payload == Frame(Opcode.TEXT, payload).serialize(mask=False)


@dataclass
class Served:
    """One accepted connection, seen from the application."""

    transport: WebSocketProtocol
    closed: list[str] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)


Client = Callable[..., connect]


@asynccontextmanager
async def serving(subprotocol: str | None = None, **options: Any) -> AsyncIterator[tuple[Client, list[Served]]]:
    """Serve an application that accepts, keeps its transport and collects messages."""
    served: list[Served] = []

    async def application(scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        transport = scope["extensions"][EXTENSION]
        assert transport.is_closed, "writable before the handshake"
        await receive()
        await send({"type": "websocket.accept", "subprotocol": subprotocol})
        served.append(Served(transport))
        transport.on_close(lambda: served[-1].closed.append("closed"))
        while (message := await receive())["type"] != "websocket.disconnect":
            served[-1].messages.append(message)

    config = uvicorn.Config(
        application, port=0, lifespan="off", log_config=None, http=HttpProtocol, ws=WebSocketProtocol,
        ws_per_message_deflate=False, **options,
    )  # fmt: skip
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    url = f"ws://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    try:
        yield (lambda **kwargs: connect(url, proxy=None, max_size=None, **kwargs)), served
    finally:
        await server.shutdown()


async def accepted(served: list[Served]) -> Served:
    while not served:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return served[-1]


@in_loop
@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536, 3 << 20])
async def test_direct_frames_arrive_whole_and_in_order_with_the_protocols_own(size: int) -> None:
    async with serving() as (client, served), client() as connection:
        transport = (await accepted(served)).transport
        for number in range(3):
            transport.write_frame(b"%d" % number + b"x" * size)
            pong = await connection.ping()
            transport.write_frame("\N{GRINNING FACE}".encode())
        for number in range(3):
            assert await connection.recv() == f"{number}" + "x" * size
            assert await connection.recv() == "\N{GRINNING FACE}"
        await asyncio.wait_for(pong, 10)


@in_loop
async def test_no_compression_is_negotiated() -> None:
    async with serving() as (client, _), client(compression="deflate") as connection:
        assert connection.protocol.extensions == []
        assert "Sec-WebSocket-Extensions" not in connection.response.headers


@in_loop
async def test_each_frame_is_one_write() -> None:
    async with serving() as (client, served), client() as connection:
        transport = (await accepted(served)).transport
        writes: list[bytes] = []

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def write(self, data: bytes) -> None:
                writes.append(data)
                real.write(data)

        real, transport.transport = transport.transport, Counting()  # type: ignore[assignment]
        for size in (1, 200, 70_000):
            transport.write_frame(b"y" * size)
            assert len(await connection.recv()) == size
        assert len(writes) == 3


@in_loop
async def test_a_peer_that_does_not_read_turns_the_transport_unwritable_until_it_catches_up() -> None:
    async with serving() as (client, served), client(max_queue=1) as connection:
        transport = (await accepted(served)).transport
        calls: list[bool] = []
        transport.on_writable(lambda: calls.append(transport.is_writable))
        num_frames = 0
        while transport.is_writable:
            transport.write_frame(b"z" * 10_000)
            num_frames += 1
            await asyncio.sleep(0)
        waiting = asyncio.create_task(transport.drain())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        for _ in range(num_frames):
            assert len(await connection.recv()) == 10_000
        await asyncio.wait_for(waiting, 10)
        assert calls == [True]


@in_loop
@pytest.mark.parametrize("how", ["close", "drop"])
async def test_the_end_is_told_once_and_later_writes_are_dropped(how: str) -> None:
    async with serving() as (client, served):
        connection = await client()
        one = await accepted(served)
        if how == "close":
            await connection.close()
        else:
            connection.transport.abort()
        while not one.closed:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert one.transport.is_closed
        assert not one.transport.is_writable
        one.transport.write_frame(b"too late")
        one.transport.close(1000)
        one.transport.abort()
        late: list[str] = []
        one.transport.on_close(lambda: late.append("at once"))
        assert (one.closed, late) == (["closed"], ["at once"])


@in_loop
async def test_close_sends_what_was_written_before_and_its_code_and_reason() -> None:
    async with serving() as (client, served), client() as connection:
        one = await accepted(served)
        one.transport.write_frame(b"last words")
        one.transport.close(1001, "old")
        one.transport.write_frame(b"never")
        assert await connection.recv() == "last words"
        await connection.wait_closed()
        assert (connection.close_code, connection.close_reason, one.closed) == (1001, "old", ["closed"])


@in_loop
async def test_invalid_text_closes_with_1007() -> None:
    async with serving() as (client, served), client() as connection:
        await accepted(served)
        await connection.send(b"\xff\xfe", text=True)
        await connection.wait_closed()
        assert connection.close_code == 1007


@in_loop
async def test_a_peer_that_does_not_answer_pings_is_let_go() -> None:
    async with serving(ws_ping_interval=0.05, ws_ping_timeout=1.0) as (client, served):
        connection = await client(ping_interval=None)
        one = await accepted(served)
        await asyncio.sleep(1.3)
        assert one.closed == []  # it answers
        connection.transport.pause_reading()
        async with asyncio.timeout(10):
            while not one.closed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        connection.transport.abort()


@in_loop
async def test_a_closed_peer_that_takes_nothing_is_cut_off_after_the_close_timeout() -> None:
    async with serving() as (client, served):
        connection: ClientConnection = await client(max_queue=1)
        one = await accepted(served)
        one.transport.close_timeout = 0.2
        connection.transport.pause_reading()
        while one.transport.is_writable:
            one.transport.write_frame(b"z" * 10_000)
            await asyncio.sleep(0)
        one.transport.close(1001)
        async with asyncio.timeout(10):
            while not one.transport.disconnected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        connection.transport.abort()


@pytest.mark.parametrize(
    ("offered", "selected"),
    [
        ([], None),
        (["aserve.chat"], "aserve.chat"),
        (["openai-insecure-api-key.sk-1"], None),
        (["openai-insecure-api-key.sk-1", "realtime", "other"], "realtime"),
    ],
)
def test_a_key_is_never_selected_as_subprotocol(offered: list[str], selected: str | None) -> None:
    assert select_protocol(offered) == selected


@in_loop
async def test_the_selected_subprotocol_is_answered() -> None:
    async with serving("aserve.chat") as (client, _):
        async with client(subprotocols=["aserve.chat", "openai-insecure-api-key.x"]) as connection:
            assert connection.subprotocol == "aserve.chat"
        with pytest.raises(NegotiationError):
            await client(subprotocols=["other"])
