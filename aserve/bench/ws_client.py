"""The load client for responses over WebSockets: sockets are opened before a request's clock starts, and kept."""

import asyncio
import base64
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import orjson

from aserve.bench.clients import LoadRequest, RequestTiming, Server, recording
from aserve.errors import AserveError

PATH = "/v1/responses"
ACCEPT_SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA


class WebSocketClient:
    """Each request has a socket to itself while it runs; a later one takes a socket over that is free."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._free: list[ResponseSocket] = []

    async def complete(self, request: LoadRequest) -> RequestTiming:
        """Stream one response."""
        create = {
            "type": "response.create",
            "model": self._server.model,
            "input": request.prompt,
            "max_output_tokens": request.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "store": False,
        }
        message = orjson.dumps(create)
        timing = RequestTiming(time.perf_counter())
        async with recording(timing, self._server.timeout_s):
            socket = await self._take_socket()
            try:
                timing.start_s = time.perf_counter()
                await socket.run(message, lambda event: _take(event, timing))
            except BaseException:
                socket.close()
                raise
            self._free.append(socket)
        return timing

    def close(self) -> None:
        """Close the sockets that are free."""
        while self._free:
            self._free.pop().close()

    async def _take_socket(self) -> "ResponseSocket":
        while self._free:
            if (socket := self._free.pop()).is_open:
                return socket
        socket = ResponseSocket(self._server)
        try:
            await self._server.connect(socket)
            await socket.opened
        except BaseException:
            socket.close()
            raise
        return socket


def _take(event: Mapping[str, Any], timing: RequestTiming) -> bool:
    """Record one event; True if it was the last."""
    kind = event["type"]
    if kind == "response.output_text.delta":
        timing.arrivals_s.append(time.perf_counter())
    elif kind in ("response.completed", "response.incomplete"):
        timing.end_s = time.perf_counter()
        timing.take_usage(event["response"]["usage"], "input_tokens", "output_tokens")
        return True
    elif kind in ("error", "response.failed"):
        raise AserveError(str(event.get("error") or event["response"]["error"]))
    return False


class ResponseSocket(asyncio.Protocol):
    """One WebSocket, which answers pings by itself; ``opened`` ends with the handshake."""

    def __init__(self, server: Server) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = server
        self._nonce = base64.b64encode(os.urandom(16))
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._frames = FrameReader()
        self._take: Callable[[Mapping[str, Any]], bool] | None = None
        self._is_done: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a message can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def run(self, message: bytes, take: Callable[[Mapping[str, Any]], bool]) -> None:
        """Send ``message`` and hand events to ``take`` until it returns True; raises what went wrong."""
        assert self._transport is not None
        self._take, self._is_done = take, asyncio.get_running_loop().create_future()
        self._transport.write(masked_frame(TEXT, message))
        await self._is_done

    def close(self) -> None:
        """Say goodbye and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(masked_frame(CLOSE, (1000).to_bytes(2, "big")))
            self._transport.close()
        self.opened.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        headers = {"Host": self._server.netloc, "Upgrade": "websocket", "Connection": "Upgrade"} | self._server.headers
        lines = [f"GET {PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        lines += ["Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {self._nonce.decode()}"]
        self._transport.write("\r\n".join(lines).encode() + b"\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        if not self.opened.done():
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            head, _, data = self._head.partition(b"\r\n\r\n")
            self._finish_handshake(head)
        try:
            for opcode, payload in self._frames.feed(data):
                self._take_frame(opcode, payload)
        except Exception as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        what = "before the response was complete" if self.opened.done() else f"after {self._head[:80]!r}"
        self._fail(error or AserveError(f"the server closed the connection {what}"))

    def _finish_handshake(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        if b" 101 " not in lines[0] + b" ":
            self._fail(AserveError(f"the server opens no WebSocket at {PATH}: {lines[0].decode(errors='replace')}"))
            return
        pairs = (line.split(b":", 1) for line in lines[1:] if b":" in line)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        digest = hashlib.sha1(self._nonce + ACCEPT_SUFFIX, usedforsecurity=False).digest()
        if headers.get(b"sec-websocket-accept") != base64.b64encode(digest):
            self._fail(AserveError("the server accepted another WebSocket handshake than this one"))
        elif not self.opened.done():
            self.opened.set_result(None)

    def _take_frame(self, opcode: int, payload: bytes) -> None:
        assert self._transport is not None
        if opcode == TEXT:
            if self._take is not None and self._take(orjson.loads(payload)) and self._is_done is not None:
                self._take = None
                self._is_done.set_result(None)
        elif opcode == PING:
            self._transport.write(masked_frame(PONG, payload))
        elif opcode == CLOSE:
            code, reason = int.from_bytes(payload[:2], "big"), payload[2:].decode(errors="replace")
            self._fail(AserveError(f"the server closed the WebSocket: {code} {reason}".rstrip()))

    def _fail(self, error: Exception) -> None:
        """Give up on the socket and tell who waits."""
        self._take = None
        if self._transport is not None:
            self._transport.close()
        for waiter in (self.opened, self._is_done):
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)
                return


class FrameReader:
    """Cuts a byte stream of a server into messages and control frames (RFC 6455, section 5)."""

    def __init__(self) -> None:
        self._buffer = b""
        self._message = b""
        self._opcode = TEXT

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield ``(opcode, payload)`` of all that is complete; fragments are joined."""
        self._buffer += data
        while (frame := self._next_frame()) is not None:
            is_last, opcode, payload = frame
            if opcode >= CLOSE:
                yield opcode, payload
                continue
            if opcode != CONTINUATION:
                self._opcode, self._message = opcode, b""
            self._message += payload
            if is_last:
                yield self._opcode, self._message

    def _next_frame(self) -> tuple[bool, int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        start, size = 2, buffer[1]
        if size & 0x80 or buffer[0] & 0x70:
            raise AserveError("the server sent a WebSocket frame that a client must refuse")
        if size >= 126:
            start = 4 if size == 126 else 10
            if len(buffer) < start:
                return None
            size = int.from_bytes(buffer[2:start], "big")
        if len(buffer) < start + size:
            return None
        self._buffer = buffer[start + size :]
        return bool(buffer[0] & 0x80), buffer[0] & 0x0F, buffer[start : start + size]


def masked_frame(opcode: int, payload: bytes) -> bytes:
    """Return a whole frame as a client must send it."""
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0xFE)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0xFF)) + size.to_bytes(8, "big")
    mask = os.urandom(4)
    repeated = (mask * (size // 4 + 1))[:size]
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
    return head + mask + masked
