"""Huge frames on a WebSocket: refused or read in time, while a stream beside them goes on."""

import asyncio
import itertools
import json
import socket as sockets
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from doubles_http import Live, in_loop, live_server, rss_bytes
from websockets.asyncio.client import connect

HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MAX_FRAME = 16 * 2**20


def create(**fields: Any) -> bytes:
    return json.dumps({"type": "response.create", **fields}, ensure_ascii=False).encode()


def padded(size: int, letter: str) -> bytes:
    """Return a create of exactly ``size`` bytes."""
    count, rest = divmod(size - len(create(input="")), len(letter.encode()))
    return create(input=letter * count + "a" * rest)


def cheap(tokens: Sequence[int], position: int) -> int:
    return 300 + position % 4000


HUGE = {
    "16 MiB text": padded(MAX_FRAME, "a"),
    "16 MiB text beyond ASCII": padded(MAX_FRAME, "ř"),
    "16 MiB text with escapes": padded(MAX_FRAME, "ř").replace("ř".encode() * 6, rb"\u0159\u0159"),
    "4 MB of words": create(input="lorem ipsum " * 350_000),
    "4 MB in instructions": create(input="a", instructions="lorem ipsum " * 350_000),
    "4 MB in parts": create(
        input=[{"role": "user", "content": [{"type": "input_text", "text": "words " * 350}] * 2000}]
    ),
    "depth": b'{"type":"response.create","input":' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "less depth": b'{"type":"response.create","input":' + b"[" * 1500 + b"]" * 1500 + b"}",
    "200,000 items": create(input=[{"role": "user", "content": "a"}] * 200_000),
    "40,000 items": create(input=[{"role": "user", "content": "a"}] * 40_000),
    "lists": b'{"type":"response.create","input":[' + b"[]," * (5 * 2**20) + b"[]]}",
    "ids": create(input="a", stop_token_ids=[5] * 400_000),
    "bias": create(input="a", logit_bias={str(i): 1 for i in range(10**5)}),
    "stops": create(input="a", stop=["a"] * 5 * 10**5),
    "no JSON": b"x" * MAX_FRAME,
    "previous id": create(input="a", previous_response_id="x" * (MAX_FRAME - 100)),
}


@asynccontextmanager
async def one_stream(live: Live) -> AsyncIterator[list[float]]:
    """Keep a response running on a socket of its own and collect when its events arrive."""
    times: list[float] = []
    async with connect(live.url.replace("http", "ws") + "/v1/responses", compression=None, proxy=None) as socket:
        await socket.send(create(input="hi", ignore_eos=True).decode())

        async def read() -> None:
            async for _ in socket:
                times.append(time.monotonic())

        reading = asyncio.create_task(read())
        yield times
        reading.cancel()


def ask(address: tuple[str, int], payload: bytes) -> dict[str, Any]:
    """Send ``payload`` as one text frame and return the answer; blocking, with next to no work of its own."""
    with sockets.create_connection(address, timeout=30) as raw:
        raw.sendall(HANDSHAKE)
        reader = raw.makefile("rb")
        while reader.readline().strip():
            pass
        mask = bytes(4)
        size = len(payload)
        length = struct.pack("!BH", 254, size) if size < 2**16 else struct.pack("!BQ", 255, size)
        raw.sendall(b"\x81" + length + mask)
        raw.sendall(payload)
        opcode, short = reader.read(2)
        assert (opcode, short < 127) == (0x81, True)
        if short == 126:
            (short,) = struct.unpack("!H", reader.read(2))
        return dict(json.loads(reader.read(short)))


@dataclass
class Disturbance:
    """What one frame did to everybody else."""

    lag_s: float
    gap_s: float
    seconds: float


async def measure(live: Live, payload: bytes, times: list[float]) -> Disturbance:
    num_before = len(times)
    live.loop_lag.reset()
    started = time.monotonic()
    answer = await asyncio.to_thread(ask, live.address, payload)
    seconds = time.monotonic() - started
    assert (answer["type"], answer["status"]) == ("error", 400), str(answer)[:300]
    assert len(json.dumps(answer)) < 500
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[num_before:])]
    return Disturbance(live.loop_lag.quantile(1), max(gaps, default=0), seconds)


@pytest.mark.alone
@pytest.mark.parametrize("name", HUGE)
@in_loop
async def test_a_huge_frame_is_refused_while_others_are_served(name: str) -> None:
    payload = HUGE[name]
    assert len(payload) <= MAX_FRAME
    async with live_server(cheap, step_time_s=0.01) as live, one_stream(live) as times:
        before = rss_bytes()
        for attempt in range(4):  # a busy machine delays everything now and then
            seen = await measure(live, payload, times)
            if attempt and seen.lag_s < 0.1 and seen.gap_s < 0.2 and seen.seconds < 1.0:
                break
        else:
            pytest.fail(f"{name}: {seen}")
        assert rss_bytes() - before < 200 * 2**20
        assert (await live.http.get("/health")).status_code == 200
