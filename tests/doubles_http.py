"""Doubles for tests of the HTTP server: a live server on a scripted engine with the demo's vocabulary, raw clients."""

import asyncio
import functools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop
from doubles_engine import until
from doubles_tuning import make_engine

from aserve.config import Config, EngineConfig, ServerConfig
from aserve.demo_model import find_demo_model
from aserve.engine.async_engine import AsyncEngine
from aserve.runner.scripted import Script, ScriptedRunner
from aserve.scheduler.limits import Limits
from aserve.server.loop_lag import LoopLag
from aserve.server.serve import running_server
from aserve.server.state import ServerState
from aserve.tokenizer.load import load_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer

MODEL = "scripted"
EOS = 2
GRIN = (10813, 242, 218)  # U+1F600
CUE = (9531, 198)  # "assistant\n": the end of a chat prompt of the demo's template
VOCAB = 49152
LIMITS = Limits(
    vocab_size=VOCAB, max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=512, num_pages=4096, page_size=16
)


@functools.cache
def demo_tokenizer() -> Tokenizer:
    """The real tokenizer of the demo model."""
    return load_tokenizer(find_demo_model())


def say(reply: str | Sequence[int], then: int | None = EOS) -> Script:
    """Reply to every prompt that ends with the cue, then go on with ``then``; None repeats the reply for ever."""
    ids = demo_tokenizer().encode(reply) if isinstance(reply, str) else list(reply)

    def script(tokens: Sequence[int], position: int) -> int:
        start = next(end for end in range(position, 1, -1) if (tokens[end - 2], tokens[end - 1]) == CUE)
        spoken = position - start
        if then is None:
            return ids[spoken % len(ids)]
        return ids[spoken] if spoken < len(ids) else then

    return script


def answer_by(choose: Callable[[str], str]) -> Script:
    """Answer each prompt of the demo's template with what ``choose`` makes of its text."""
    tokenizer = demo_tokenizer()

    @functools.cache
    def answer(prompt: tuple[int, ...]) -> list[int]:
        return [*tokenizer.encode(choose(tokenizer.decode(prompt, skip_special_tokens=False))), EOS]

    def script(tokens: Sequence[int], position: int) -> int:
        start = next(end for end in range(position, 1, -1) if (tokens[end - 2], tokens[end - 1]) == CUE)
        spoken = answer(tuple(tokens[:start]))
        return spoken[min(position - start, len(spoken) - 1)]  # one more step may be on its way when the answer ends

    return script


class Turns:
    """A script that gives ``replies`` one after another, a turn each, letter by letter, and keeps the prompts."""

    def __init__(self, replies: Sequence[str]) -> None:
        self.prompts: list[list[int]] = []
        self.replies = [[token for letter in text for token in demo_tokenizer().encode(letter)] for text in replies]

    def __call__(self, tokens: Sequence[int], position: int) -> int:
        known = list(tokens[:position])
        cues = [end for end in range(2, position + 1) if tuple(known[end - 2 : end]) == CUE]
        if cues[-1] == position:
            self.prompts.append(known)
        reply, spoken = [*self.replies[len(cues) - 1], EOS], position - cues[-1]
        return reply[min(spoken, len(reply) - 1)]


def count_up(tokens: Sequence[int], position: int) -> int:
    """Go on for ever with tokens that depend on the whole row."""
    return 300 + (sum(tokens[:position]) * 31 + position) % 40000


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on uvloop, as the server does."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(asyncio.wait_for(test(*args, **kwargs), 100))

    return run


def once_set(may_go_on: threading.Event, script: Script) -> Script:
    """Hold the device in its first step until ``may_go_on`` is set, then do what ``script`` says."""

    def held(tokens: Sequence[int], position: int) -> int | Sequence[float]:
        assert may_go_on.wait(30)
        return script(tokens, position)

    return held


@dataclass
class Live:
    """A running server and a client for it."""

    url: str
    engine: AsyncEngine
    runner: ScriptedRunner
    state: ServerState
    loop_lag: LoopLag
    http: httpx.AsyncClient

    @property
    def address(self) -> tuple[str, int]:
        parsed = httpx.URL(self.url)
        assert parsed.port is not None
        return parsed.host, parsed.port

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **fields)

    async def complete(self, prompt: Any = (5, *CUE), **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", prompt=prompt, **fields)

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self.http.post(path, content=json.dumps(fields), headers={"content-type": "application/json"})

    async def until_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until the engine has no request; then nothing may be held."""
        steps = self.engine._steps
        assert steps is not None
        await until(lambda: not steps.streams and not steps.scheduler.num_in_flight, timeout_s)
        self.check_clean()

    def check_clean(self) -> None:
        """Nothing is left of any request."""
        assert self.engine._steps is not None
        self.engine._steps.scheduler.check_integrity()
        stats = self.engine.stats()
        assert (stats.num_open, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.scheduler.num_held_pages == 0

    async def check_alive(self) -> None:
        """The server still answers everybody else."""
        assert (await self.http.get("/health")).status_code == 200
        answer = await self.complete([7, *CUE], max_tokens=3, temperature=0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] in (1, 2, 3)


@asynccontextmanager
async def live_server(
    script: Script = count_up,
    *,
    step_time_s: float | None = 0.0,
    limits: Limits = LIMITS,
    engine: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> AsyncIterator[Live]:
    """Serve a scripted engine on a free port, with the demo's tokenizer unless another is given.

    At the end nothing may be left open.
    """
    runner = ScriptedRunner(limits, script, step_time_s=step_time_s)
    config = Config(
        engine=EngineConfig(served_model_name=MODEL, **(engine or {})), server=ServerConfig(port=0, **settings)
    )
    before = asyncio.all_tasks()
    async with make_engine(config.engine, runner=runner, tokenizer=tokenizer or demo_tokenizer()) as started:
        async with (
            running_server(config, started) as server,
            httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers, verify=False) as http,
        ):
            yield Live(server.url, started, runner, server.state, server.loop_lag, http)
        assert not server.state._connections
        assert not len(server.state.heartbeat)
    assert asyncio.all_tasks() == before


def events(text: str) -> list[Any]:
    """Return the data of a whole SSE answer, checked for its form; ``[DONE]`` must be the last and is left out."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the last event is not complete"
    data = []
    for block in blocks:
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        assert len(block.splitlines()) == 1, block
        data.append(block.removeprefix("data: "))
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def joined(chunks: Sequence[dict[str, Any]], choice: int = 0) -> str:
    """Return the text of one choice of a stream."""
    choices = [one for chunk in chunks for one in chunk.get("choices", ()) if one["index"] == choice]
    return "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices)


@asynccontextmanager
async def raw_post(
    live: Live, path: str, body: dict[str, Any], *, receive_buffer: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send one request on a socket of its own, whose reader the caller controls."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await loop.sock_connect(sock, live.address)
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_buffer or 2**16)
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def one_stream(live: Live) -> AsyncIterator[list[float]]:
    """Keep a stream running and collect when its events arrive."""
    times: list[float] = []
    async with raw_post(live, "/v1/completions", {"prompt": [5, *CUE], "max_tokens": 8000, "stream": True}) as (
        reader,
        _,
    ):

        async def read() -> None:
            while True:
                await reader.readuntil(b"data: ")
                times.append(time.monotonic())

        reading = asyncio.create_task(read())
        yield times
        reading.cancel()


async def fetch(live: Live, path: str, **fields: Any) -> str:
    """Return the body of a chunked answer, read on a socket of its own; cheaper than a client library."""
    async with raw_post(live, path, fields) as (reader, _):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head, head
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        return body.decode()


def rss_bytes() -> int:
    """Return this process's resident memory, and forget its peak so far."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Return the most resident memory that this process had since ``rss_bytes``."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
