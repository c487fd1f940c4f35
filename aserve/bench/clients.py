"""The two load clients: chat completions over SSE, responses over a WebSocket.

Both report when each piece of text arrived and nothing else; they parse as little as they can, so
that the load generator is not what is measured.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson
from websockets.asyncio.client import connect

from aserve.errors import AserveError

REQUEST_TIMEOUT_S = 600.0
LOOKUP_TIMEOUT_S = 30.0


@dataclass(slots=True)
class RequestTiming:
    """Seconds on ``time.perf_counter``; ``arrivals_s`` has one entry per event that carried text."""

    start_s: float
    arrivals_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_output_tokens: int = 0
    error: str | None = None


@asynccontextmanager
async def _recording(timing: RequestTiming, timeout_s: float) -> AsyncIterator[None]:
    """Bound one request in time; whatever goes wrong in it is its result, since the others must go on."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            yield
    except Exception as error:
        late = f"not complete after {timeout_s:g} s" if deadline.expired() else ""
        timing.error = late or str(error) or type(error).__name__


class LoadClient(Protocol):
    """Sends one prompt and times the answer."""

    async def complete(self, prompt: str, max_tokens: int) -> RequestTiming:
        """Run one request to its end; failures go into ``error``."""


class SseClient:
    """One HTTP/1.1 connection a request, as a load balancer would see it."""

    def __init__(self, url: str, model: str, key: str | None, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._target = urlsplit(url)
        self._model = model
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def complete(self, prompt: str, max_tokens: int) -> RequestTiming:
        """Stream one chat completion."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timing = RequestTiming(time.perf_counter())
        async with _recording(timing, self._timeout_s):
            await self._stream(orjson.dumps(body), timing)
        timing.end_s = time.perf_counter()
        return timing

    async def _stream(self, body: bytes, timing: RequestTiming) -> None:
        reader, writer = await open_connection(self._target)
        try:
            writer.write(http_request("POST", "/v1/chat/completions", self._target.netloc, self._headers, body))
            status = _parse_status(await reader.readline())
            while (await reader.readline()).strip():
                pass  # headers
            if status != 200:
                raise AserveError(f"HTTP {status}: {(await reader.read(2000)).decode(errors='replace')}")
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    self._take(orjson.loads(line[6:]), timing)
                elif line.startswith(b"data: [DONE]"):
                    return
            raise AserveError("the stream ended without [DONE]")
        finally:
            writer.close()

    @staticmethod
    def _take(event: Mapping[str, Any], timing: RequestTiming) -> None:
        if "error" in event:
            raise AserveError(str(event["error"]))
        if usage := event.get("usage"):
            timing.num_output_tokens = usage["completion_tokens"]
        if any(choice["delta"].get("content") for choice in event["choices"]):
            timing.arrivals_s.append(time.perf_counter())


class WebSocketClient:
    """One WebSocket a request, opened before its clock starts."""

    def __init__(self, url: str, model: str, key: str | None, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._url = "ws" + url.removeprefix("http") + "/v1/responses"
        self._model = model
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def complete(self, prompt: str, max_tokens: int) -> RequestTiming:
        """Stream one response."""
        create = {
            "type": "response.create",
            "model": self._model,
            "input": prompt,
            "max_output_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        timing = RequestTiming(time.perf_counter())
        async with (
            _recording(timing, self._timeout_s),
            connect(self._url, additional_headers=self._headers, max_size=None, compression=None) as socket,
        ):
            timing.start_s = time.perf_counter()
            await socket.send(orjson.dumps(create).decode())
            async for message in socket:
                if self._take(message, timing):
                    break
            else:
                raise AserveError("the server closed the connection before the response was complete")
        timing.end_s = timing.end_s or time.perf_counter()
        return timing

    @staticmethod
    def _take(message: str | bytes, timing: RequestTiming) -> bool:
        """Record one event; True if it was the last."""
        event = orjson.loads(message)
        kind = event["type"]
        if kind == "response.output_text.delta":
            timing.arrivals_s.append(time.perf_counter())
        elif kind in ("response.completed", "response.incomplete"):
            timing.num_output_tokens = event["response"]["usage"]["output_tokens"]
            timing.end_s = time.perf_counter()
            return True
        elif kind in ("error", "response.failed"):
            raise AserveError(str(event.get("error") or event["response"]["error"]))
        return False


def _parse_status(line: bytes) -> int:
    """Return the status of an HTTP status line."""
    words = line.split(maxsplit=2)
    if len(words) < 2 or not words[1].isdigit():
        what = f"answered {line[:80]!r}" if line else "closed the connection without an answer"
        raise AserveError(f"the server {what}")
    return int(words[1])


async def open_connection(target: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the host and port of a split URL."""
    secure = ssl.create_default_context() if target.scheme == "https" else None
    port = target.port or (443 if secure else 80)
    return await asyncio.open_connection(target.hostname, port, ssl=secure, limit=1 << 20)


def http_request(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Build an HTTP/1.1 request that closes its connection."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def served_model(url: str, key: str | None) -> str:
    """Ask the server for the name of its model; raises AserveError if it cannot say."""
    target = urlsplit(url)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            reader, writer = await open_connection(target)
            writer.write(http_request("GET", "/v1/models", target.netloc, headers))
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
    except OSError as error:  # TimeoutError is one
        raise AserveError(f"no server at {url}: {error or 'no answer'}") from error
    if b" 200 " not in head.split(b"\r\n")[0] + b" ":
        raise AserveError(f"{url}/v1/models answered {head.splitlines()[0].decode() if head else 'nothing'}")
    name: str = orjson.loads(body)["data"][0]["id"]
    return name
