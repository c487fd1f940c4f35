"""What the load clients have in common: a request, its timing, the server they talk to.

They report when each piece of text arrived and nothing else, and parse as little as they can, so that the load
generator is not what is measured.
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

from aserve.errors import AserveError

REQUEST_TIMEOUT_S = 600.0
LOOKUP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt, as text or token ids, and the exact number of tokens to generate."""

    prompt: str | list[int]
    output_len: int


@dataclass(slots=True)
class RequestTiming:
    """Seconds on ``time.perf_counter``; ``arrivals_s`` has one entry per event that carried text."""

    start_s: float
    arrivals_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    def take_usage(self, usage: Mapping[str, Any], prompt: str, output: str) -> None:
        """Read the counts from a usage object, which names them by endpoint."""
        self.num_prompt_tokens, self.num_output_tokens = usage[prompt], usage[output]


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go. ``url`` has no slash at its end."""

    url: str
    model: str
    key: str | None = None
    timeout_s: float = REQUEST_TIMEOUT_S

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def netloc(self) -> str:
        """The value of the Host header."""
        return urlsplit(self.url).netloc

    async def connect(self, protocol: Any) -> None:
        """Open a connection for ``protocol``, an asyncio.Protocol."""
        host, port, secure = _address(self.url)
        await asyncio.get_running_loop().create_connection(lambda: protocol, host, port, ssl=secure)


class LoadClient(Protocol):
    """Sends one request and times the answer."""

    async def complete(self, request: LoadRequest) -> RequestTiming:
        """Run one request to its end; failures go into ``error``."""

    def close(self) -> None:
        """Close the connections that were kept for the next request."""


@asynccontextmanager
async def recording(timing: RequestTiming, timeout_s: float) -> AsyncIterator[None]:
    """Bound one request in time; whatever goes wrong in it is its result, since the others must go on."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            yield
    except Exception as error:
        late = f"not complete after {timeout_s:g} s" if deadline.expired() else ""
        timing.error = late or str(error) or type(error).__name__
    timing.end_s = timing.end_s or time.perf_counter()


def http_request(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Build an HTTP/1.1 request that closes its connection."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def served_model(url: str, key: str | None) -> str:
    """Ask the server for the name of its model; raises AserveError if it cannot say."""
    name: str = orjson.loads(await fetch(Server(url, "", key), "/v1/models"))["data"][0]["id"]
    return name


async def fetch(server: Server, path: str) -> bytes:
    """Return the body of a GET; raises AserveError if there is no server or it answers with anything but 200."""
    return await _exchange(server, path, http_request("GET", path, server.netloc, server.headers), LOOKUP_TIMEOUT_S)


async def post(server: Server, path: str, content: bytes) -> bytes:
    """Return the body of the answer to a POST of JSON; raises AserveError as ``fetch`` does."""
    request = http_request("POST", path, server.netloc, server.headers, content)
    return await _exchange(server, path, request, server.timeout_s)


async def _exchange(server: Server, path: str, request: bytes, timeout_s: float) -> bytes:
    url = server.url
    host, port, secure = _address(url)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=secure)
            writer.write(request)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
    except OSError as error:  # TimeoutError is one
        raise AserveError(f"no server at {url}: {error or 'no answer'}; --url names another") from error
    if b" 200 " not in head.split(b"\r\n")[0] + b" ":
        raise AserveError(f"{url}{path} answered {head.splitlines()[0].decode() if head else 'nothing'}")
    return body


def _address(url: str) -> tuple[str, int, ssl.SSLContext | None]:
    target = urlsplit(url)
    if target.scheme not in ("http", "https") or not target.hostname:
        raise AserveError(f"{url!r} is not an http:// or https:// address")
    secure = ssl.create_default_context() if target.scheme == "https" else None
    return target.hostname, target.port or (443 if secure else 80), secure
