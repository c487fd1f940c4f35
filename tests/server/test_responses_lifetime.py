"""How a socket ends: by the client at any point, by age, by a stopping server, by a stalled reader."""

import asyncio
import gc
import json
import socket as sockets
import struct
import weakref
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from doubles_engine import until
from doubles_responses import plain
from doubles_socket import (
    LIMITS,
    TERMINAL,
    Live,
    in_loop,
    receive,
    receive_until,
    respond,
    scripted_server,
    send,
    text_of,
)
from websockets.exceptions import ConnectionClosed

from aserve.errors import CapacityError
from aserve.server.responses import start as response_start
from aserve.server.responses.run import ResponseRun


def reset(connection: Any) -> None:
    """Close with RST, as a process that dies may."""
    raw = connection.transport.get_extra_info("socket")
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
    connection.transport.abort()


async def leave(connection: Any, how: str) -> None:
    if how == "close":
        await connection.close()
    elif how == "drop":
        connection.transport.abort()
    else:
        reset(connection)


@in_loop
@pytest.mark.parametrize("how", ["close", "drop", "reset"])
@pytest.mark.parametrize("num_deltas", [0, 1, 5])
async def test_leaving_aborts_what_runs_and_what_waits(how: str, num_deltas: int) -> None:
    async with scripted_server(step_time_s=0.002) as live:
        for _ in range(5):
            connection = await live.connect()
            await send(connection, input="count")
            await send(connection, input="count", stream_id="other")
            await send(connection, input="count")
            for _ in range(num_deltas):
                await receive_until(connection, "response.output_text.delta")
            await leave(connection, how)
        await live.lose_connections()
        await live.become_idle()


@in_loop
async def test_leaving_in_the_middle_of_a_prefill_aborts() -> None:
    async with scripted_server(step_time_s=0.01) as live:
        async with live.connect() as connection:
            await send(connection, input="x" * 3000)  # several chunks
            await receive_until(connection, "response.in_progress")
        await live.become_idle()


@in_loop
async def test_a_connection_that_ends_normally_aborts_nothing() -> None:
    async with scripted_server() as live:
        for _ in range(10):
            async with live.connect() as connection:
                assert text_of(await respond(connection, input="say a")) == "a"
        await live.become_idle()
        assert live.engine.stats().num_aborts == 0


class WatchedRun(ResponseRun):
    __slots__ = ("__weakref__",)


def watch_runs(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[ResponseRun]]:
    """Return the runs that will be made, while no garbage is collected."""
    runs: list[weakref.ref[ResponseRun]] = []

    def start(*args: Any, **options: Any) -> ResponseRun:
        run = WatchedRun(*args, **options)
        runs.append(weakref.ref(run))
        return run

    monkeypatch.setattr(response_start, "ResponseRun", start)
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)  # the engine collects when it is idle
    monkeypatch.setattr(gc, "enable", lambda: None)
    return runs


@in_loop
@pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
async def test_nothing_of_a_response_waits_for_the_garbage_collector(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = watch_runs(monkeypatch)
    async with scripted_server(step_time_s=0.002) as live:
        gc.disable()
        async with live.connect() as connection:
            session = weakref.ref(next(iter(live.state._connections)))
            await send(connection, input={"completed": "say a", "failed": "fail", "cancelled": "count"}[how])
            await receive_until(connection, "response.output_text.delta")
            if how == "cancelled":
                await send(connection, "response.cancel")
            await receive_until(connection, *TERMINAL)
        await live.lose_connections()
        async with live.connect() as connection:  # the step loop's variables go on to another stream
            await respond(connection, input="say b")
        await until(lambda: runs[0]() is None and session() is None)
    monkeypatch.undo()
    gc.enable()


@in_loop
async def test_counting_tokens_leaves_nothing_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = watch_runs(monkeypatch)
    async with scripted_server() as live, plain(live) as client:
        gc.disable()
        assert (await client.post("/responses/input_tokens", json={"input": "abc"})).json()["input_tokens"] == 4
        await until(lambda: runs[0]() is None)
    monkeypatch.undo()
    gc.enable()


@in_loop
async def test_the_reader_works_while_a_response_runs() -> None:
    async with scripted_server(step_time_s=0.005) as live, live.connect() as connection:
        await send(connection, input="count")
        await receive_until(connection, "response.output_text.delta")
        async with asyncio.timeout(10):
            await (await connection.ping())
        await send(connection, "no.such.event")
        events = await receive_until(connection, "error")
        assert events[-1]["error"]["code"] == "unknown_event_type"
        await receive_until(connection, "response.output_text.delta")


@in_loop
async def test_an_old_connection_lets_its_response_end_and_closes() -> None:
    async with scripted_server(step_time_s=0.005, max_connection_age_s=0.6) as live, live.connect() as connection:
        await send(connection, input="say " + "a" * 300)
        await asyncio.sleep(0.65)
        await send(connection, input="say too late")
        events = await receive_until(connection, "error")
        assert events[-2]["type"] == "response.completed"
        assert text_of(events) == "a" * 300
        error = events[-1]
        assert (error["status"], error["error"]["code"]) == (400, "websocket_connection_limit_reached")
        with pytest.raises(ConnectionClosed):
            await receive_until(connection, "response.created")
        assert connection.close_code == 1001


@in_loop
async def test_an_old_connection_that_does_not_end_is_closed_all_the_same() -> None:
    settings = {"max_connection_age_s": 0.1, "drain_timeout_s": 0.2}
    async with scripted_server(step_time_s=0.005, **settings) as live, live.connect() as connection:
        await send(connection, input="count")
        events = await receive_until(connection, "error")
        assert events[-1]["error"]["code"] == "websocket_connection_limit_reached"
        await connection.wait_closed()
        assert connection.close_code == 1001
        await live.become_idle()


@in_loop
async def test_an_idle_old_connection_is_told_and_closed() -> None:
    async with scripted_server(max_connection_age_s=0.1) as live, live.connect() as connection:
        assert (await receive(connection))["error"]["code"] == "websocket_connection_limit_reached"
        await connection.wait_closed()
        assert connection.close_code == 1001


@in_loop
async def test_a_draining_server_finishes_what_runs_and_refuses_the_rest() -> None:
    async with scripted_server(step_time_s=0.005) as live, live.connect() as busy, live.connect() as idle:
        await send(busy, input="say " + "a" * 50)
        await send(busy, input="say queued")
        await receive_until(busy, "response.created")
        live.state.begin_drain()
        await idle.wait_closed()
        assert idle.close_code == 1012
        assert text_of(await receive_until(busy, *TERMINAL)) == "a" * 50
        error = await receive(busy)
        assert (error["status"], error["error"]["type"]) == (503, "service_unavailable_error")
        await busy.wait_closed()
        assert busy.close_code == 1012


@in_loop
async def test_a_server_that_stops_fails_what_runs() -> None:
    async with scripted_server(step_time_s=0.005) as live, live.connect() as connection:
        await send(connection, input="count")
        await receive_until(connection, "response.output_text.delta")
        live.state.shut_down(CapacityError("the server is shutting down"))
        events = await receive_until(connection, *TERMINAL)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["message"] == "the server is shutting down"
        await connection.wait_closed()
        assert connection.close_code == 1012
        await live.become_idle()


@asynccontextmanager
async def deaf_sockets(live: Live, count: int) -> AsyncIterator[list[sockets.socket]]:
    """Ask for endless responses over raw sockets with a small receive buffer; read nothing but the handshake."""
    loop = asyncio.get_running_loop()
    upgrade = (
        "GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    body = json.dumps({"type": "response.create", "input": "count", "ignore_eos": True}).encode()
    assert len(body) < 126
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            raw = stack.enter_context(sockets.socket())
            opened.append(raw)
            raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await loop.sock_connect(raw, ("127.0.0.1", live.port))
            await loop.sock_sendall(raw, upgrade.encode())
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += await loop.sock_recv(raw, 1)
            await loop.sock_sendall(raw, bytes((0x81, 0x80 | len(body))) + bytes(4) + body)
        yield opened


@in_loop
@pytest.mark.parametrize("ending", ["deadline", "reset"])
async def test_readers_that_stall_cost_bounded_memory_and_are_cut_off(ending: str) -> None:
    stall_s = 3.0 if ending == "deadline" else 30.0
    limits = replace(LIMITS, num_pages=21 * LIMITS.max_model_len // LIMITS.page_size)  # none has to wait for another
    async with (
        scripted_server(lambda tokens, position: 97, step_time_s=0.001, stall_timeout_s=stall_s, limits=limits) as live,
        deaf_sockets(live, 20) as deaf,
    ):
        async with live.connect() as reader:
            await send(reader, input="count", max_output_tokens=500)
            assert len(text_of(await receive_until(reader, *TERMINAL))) == 500  # nobody waits for the deaf
        assert live.engine.stats().num_open == 20
        async with asyncio.timeout(30):
            while any(protocol.is_writable for protocol in live.protocols):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for protocol in live.protocols:
            assert protocol.transport.get_write_buffer_size() < 256 * 1024
        if ending == "reset":
            for raw in deaf:
                raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
                raw.close()
        await live.lose_connections(timeout_s=10)
        await live.become_idle()


@in_loop
async def test_a_client_that_sends_but_never_reads_is_not_answered_without_bound() -> None:
    async with scripted_server(stall_timeout_s=0.5) as live, deaf_sockets(live, 1) as (raw,):
        loop = asyncio.get_running_loop()
        frame = bytes((0x81, 0x80 | 2)) + bytes(4) + b"{}"
        ping = bytes((0x89, 0x80 | 100)) + bytes(4) + bytes(100)

        async def flood() -> None:
            while True:
                await loop.sock_sendall(raw, (frame + ping) * 1000)
                for protocol in live.protocols:
                    assert protocol.transport.get_write_buffer_size() < 512 * 1024

        with pytest.raises(ConnectionError):  # cut off after the deadline
            await asyncio.wait_for(flood(), 20)
        await live.become_idle()


@in_loop
async def test_tasks_are_back_to_base_after_many_connections() -> None:
    async with scripted_server(step_time_s=0.001) as live:
        await (await live.connect()).close()
        await live.become_idle()
        before = len(asyncio.all_tasks())
        connections = [await live.connect() for _ in range(50)]
        for connection in connections:
            await send(connection, input="count")
        await asyncio.gather(*(receive_until(connection, "response.output_text.delta") for connection in connections))
        for connection in connections:
            connection.transport.abort()
        await live.lose_connections()
        await live.become_idle()
        await until(lambda: len(asyncio.all_tasks()) <= before)
