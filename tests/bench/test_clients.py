"""The load clients against servers that misbehave, and their framing against the websockets library's."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
import websockets
from doubles_http import in_loop
from websockets.frames import Frame, Opcode

from aserve.bench.clients import LoadClient, LoadRequest, RequestTiming, Server
from aserve.bench.load import Arrivals, run_share, split_load
from aserve.bench.sse_client import SseClient, SseStream
from aserve.bench.ws_client import FrameReader, WebSocketClient, masked_frame
from aserve.errors import AserveError

CLIENTS: list[Callable[[Server], LoadClient]] = [SseClient, WebSocketClient]
EVENTS = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("a", "é\n", "")]


@asynccontextmanager
async def raw_server(answer: bytes | None) -> AsyncIterator[str]:
    """Answer every connection with ``answer`` and close it; None never answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if answer is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"", "closed the connection"),
        (b"nonsense\r\n\r\n", "nonsense"),
        (b"HTTP/1.1 503 Full\r\nContent-Length: 4\r\n\r\nfull", "503"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""),
        (b"HTTP/1.1 101 Switching\r\nSec-WebSocket-Accept: x\r\n\r\n", ""),
    ],
)
@in_loop
async def test_a_server_that_answers_wrongly_fails_each_request_only(client: Any, answer: bytes, told: str) -> None:
    requests = [LoadRequest("hi", 4)] * 5
    async with raw_server(answer) as url:
        (share,) = split_load(requests, Arrivals(concurrency=2), 1, 0)
        timings = await run_share(client(Server(url, "m")), share, 0.0)
    assert len(timings) == 5
    assert all(timing.error and not timing.arrivals_s for timing in timings)
    assert told in str(timings[0].error)


@pytest.mark.parametrize("client", CLIENTS)
@in_loop
async def test_a_server_that_never_answers_fails_the_request_in_time(client: Any) -> None:
    async with raw_server(None) as url:
        waiting: LoadClient = client(Server(url, "m", timeout_s=0.2))
        timing = await asyncio.wait_for(waiting.complete(LoadRequest("hi", 4)), 5)
    assert timing.error == "not complete after 0.2 s"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x"])
@in_loop
async def test_an_address_that_is_none_is_named(url: str) -> None:
    timing = await SseClient(Server(url, "m")).complete(LoadRequest("hi", 4))
    assert timing.error == f"{url!r} is not an http:// or https:// address"


def chunked(body: bytes, rng: random.Random) -> bytes:
    """Frame ``body`` as an HTTP answer with chunks that respect no border of events."""
    parts = []
    while body:
        size = rng.randint(1, 60)
        parts.append(b"%x\r\n%s\r\n" % (len(body[:size]), body[:size]))
        body = body[size:]
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("seed", range(20))
@in_loop
async def test_events_survive_any_cut_of_chunks_and_reads(seed: int) -> None:
    rng = random.Random(seed)
    body = b": keep-alive\n\n" + b"".join(b"data: %s\n\n" % orjson.dumps(event) for event in EVENTS)
    raw = chunked(body + b"data: [DONE]\n\n", rng)
    taken: list[Any] = []
    stream = SseStream(taken.append)
    while raw:
        size = rng.choice((1, 2, 7, 100))
        stream.data_received(raw[:size])
        raw = raw[size:]
    await stream.is_done
    assert taken == EVENTS


@in_loop
async def test_a_stream_without_its_end_is_an_error() -> None:
    stream = SseStream(lambda event: None)
    stream.data_received(chunked(b"data: {}\n\n", random.Random(0)))
    with pytest.raises(AserveError, match=r"without \[DONE\]"):
        await stream.is_done


@pytest.mark.parametrize("size", [0, 1, 125, 126, 300, 65535, 65536, 200_000])
def test_frames_are_what_the_library_reads(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    reader = websockets.streams.StreamReader()
    reader.feed_data(masked_frame(Opcode.TEXT, payload))
    parse = Frame.parse(reader.read_exact, mask=True)
    with pytest.raises(StopIteration) as done:
        next(parse)
    assert done.value.value == Frame(Opcode.TEXT, payload, fin=True)


@pytest.mark.parametrize("seed", range(20))
def test_frames_that_the_library_writes_are_read_in_any_cut(seed: int) -> None:
    rng = random.Random(seed)
    raw, expected = b"", []
    for _ in range(10):
        payload = rng.randbytes(rng.choice((0, 3, 125, 126, 5000, 70000)))
        cut = rng.randint(0, len(payload))
        raw += Frame(Opcode.TEXT, payload[:cut], fin=False).serialize(mask=False)
        raw += Frame(Opcode.PING, b"now").serialize(mask=False)  # control frames may come between fragments
        raw += Frame(Opcode.CONT, payload[cut:]).serialize(mask=False)
        expected += [(Opcode.PING, b"now"), (Opcode.TEXT, payload)]
    frames = FrameReader()
    taken: list[tuple[int, bytes]] = []
    while raw:
        size = rng.choice((1, 2, 9, 4000))
        taken += frames.feed(raw[:size])
        raw = raw[size:]
    assert taken == expected


def test_a_masked_frame_from_a_server_is_refused() -> None:
    with pytest.raises(AserveError, match="must refuse"):
        list(FrameReader().feed(masked_frame(Opcode.TEXT, b"x")))


@asynccontextmanager
async def library_server(answer: Callable[[websockets.ServerConnection], Any]) -> AsyncIterator[str]:
    async with websockets.serve(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


COMPLETED = {"type": "response.completed", "response": {"usage": {"input_tokens": 7, "output_tokens": 2}}}


@in_loop
async def test_a_socket_is_kept_for_the_next_request_and_answers_pings() -> None:
    sockets, paths, creates = set(), set(), []

    async def answer(socket: websockets.ServerConnection) -> None:
        sockets.add(socket)
        assert socket.request is not None
        paths.add((socket.request.path, socket.request.headers.get("Authorization")))
        async for message in socket:
            creates.append(orjson.loads(message))
            await (await socket.ping())  # ends with the pong
            for text in ("a", "b"):
                await socket.send(orjson.dumps({"type": "response.output_text.delta", "delta": text}).decode())
            await socket.send(orjson.dumps(COMPLETED).decode())

    async with library_server(answer) as url:
        client = WebSocketClient(Server(url, "m", "secret"))
        timings = [await client.complete(LoadRequest("hi", 2)) for _ in range(3)]
        both = await asyncio.gather(client.complete(LoadRequest("x", 2)), client.complete(LoadRequest("y", 2)))
        client.close()
    assert [timing.error for timing in (*timings, *both)] == [None] * 5
    assert {(t.num_prompt_tokens, t.num_output_tokens, len(t.arrivals_s)) for t in timings} == {(7, 2, 2)}
    assert len(sockets) == 2  # only two were ever needed at a time
    assert paths == {("/v1/responses", "Bearer secret")}
    assert creates[0] | {"input": "hi", "max_output_tokens": 2, "model": "m", "ignore_eos": True} == creates[0]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"type": "error", "status": 400, "error": {"message": "no such model"}}, "no such model"),
        ({"type": "response.failed", "response": {"error": {"message": "it broke"}}}, "it broke"),
        (None, "closed the WebSocket: 1011 busy"),
    ],
)
@in_loop
async def test_what_a_socket_says_went_wrong_is_the_result(message: Any, told: str) -> None:
    async def answer(socket: websockets.ServerConnection) -> None:
        await socket.recv()
        if message is None:
            await socket.close(1011, "busy")
        else:
            await socket.send(orjson.dumps(message).decode())
            await socket.wait_closed()

    async with library_server(answer) as url:
        client = WebSocketClient(Server(url, "m"))
        timings: list[RequestTiming] = [await client.complete(LoadRequest("hi", 2)) for _ in range(2)]
    assert all(told in str(timing.error) for timing in timings)
