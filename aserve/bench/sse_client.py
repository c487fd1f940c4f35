"""The load client for chat completions and completions over SSE: one HTTP/1.1 connection a request."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import httptools
import orjson

from aserve.bench.clients import LoadRequest, RequestTiming, Server, http_request, recording
from aserve.errors import AserveError

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
MAX_ERROR_BYTES = 2000


class SseClient:
    """Opens a connection for each request, as a load balancer would see it; that time counts."""

    def __init__(self, server: Server, endpoint: Endpoint = "chat") -> None:
        self._server = server
        self._endpoint: Endpoint = endpoint

    async def complete(self, request: LoadRequest) -> RequestTiming:
        """Stream one completion."""
        body = orjson.dumps(self._body(request))
        head_and_body = http_request("POST", PATHS[self._endpoint], self._server.netloc, self._server.headers, body)
        timing = RequestTiming(time.perf_counter())
        async with recording(timing, self._server.timeout_s):
            stream = SseStream(lambda event: _take(event, timing))
            try:
                await self._server.connect(stream)
                stream.transport.write(head_and_body)
                await stream.is_done
            finally:
                stream.close()
        return timing

    def close(self) -> None:
        """Nothing is kept."""

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._server.model,
            "max_tokens": request.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._endpoint == "completions":
            return body | {"prompt": request.prompt}
        return body | {"messages": [{"role": "user", "content": request.prompt}]}


def _take(event: Mapping[str, Any], timing: RequestTiming) -> None:
    if "error" in event:
        raise AserveError(str(event["error"]))
    if usage := event.get("usage"):
        timing.take_usage(usage, "prompt_tokens", "completion_tokens")
    for choice in event["choices"]:
        if choice["text"] if "text" in choice else choice["delta"].get("content"):
            timing.arrivals_s.append(time.perf_counter())
            return


class SseStream(asyncio.Protocol):
    """Hands each event of one answer to ``take``; ``is_done`` ends with [DONE], or with what went wrong."""

    transport: asyncio.Transport

    def __init__(self, take: Callable[[Mapping[str, Any]], None]) -> None:
        self.is_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._rest = b""  # of the body: a line that is not complete, or the beginning of an error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(f"the server answered {data[:80]!r}")

    def connection_lost(self, error: Exception | None) -> None:
        nothing = "the server closed the connection without an answer"
        self._fail(str(error or ("the stream ended without [DONE]" if self._status else nothing)))

    def close(self) -> None:
        """Close the connection, if there is one."""
        if hasattr(self, "transport"):
            self.transport.close()
        self.is_done.cancel()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Called by the parser, chunk framing removed; an event may come in parts."""
        self._rest += body
        if self._status != 200:
            self._rest = self._rest[:MAX_ERROR_BYTES]
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self._take_data(line[6:])

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._status != 200:
            self._fail(f"HTTP {self._status}: {self._rest.decode(errors='replace')}")
        self._fail("the stream ended without [DONE]")

    def _take_data(self, data: bytes) -> None:
        if self.is_done.done():
            return
        if data.startswith(b"[DONE]"):
            self.is_done.set_result(None)
            return
        try:
            self._take(orjson.loads(data))
        except Exception as error:
            self.is_done.set_exception(error)

    def _fail(self, reason: str) -> None:
        if not self.is_done.done():
            self.is_done.set_exception(AserveError(reason))
