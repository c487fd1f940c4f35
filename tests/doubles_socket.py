"""Doubles for tests of the WebSocket: a live server on a scripted engine, and a client that checks every event."""

import asyncio
import functools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import uvloop
from doubles_engine import EOS, LetterTokenizer, letters
from doubles_tuning import make_engine
from openai.types.responses import ResponsesServerEvent
from websockets.asyncio.client import ClientConnection, connect

from aserve.config import Config, EngineConfig, ServerConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.runner.scripted import RowFailure, ScriptedRunner
from aserve.scheduler.limits import Limits
from aserve.server.serve import RunningServer, running_server
from aserve.server.state import ServerState
from aserve.server.ws_protocol import WebSocketProtocol

LIMITS = Limits(
    vocab_size=256, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512, num_pages=4096, page_size=4
)
MODEL = "scripted"

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")

EVENT_TYPES: dict[str, Any] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponsesServerEvent)[0])
}


class ServedTokenizer(LetterTokenizer):
    special_token_ids = frozenset({EOS})


def obey(tokens: Sequence[int], position: int) -> int:
    """Do what the last message says: ``say X`` (then end), ``fail`` (the row), ``crash`` (the step), else letters."""
    text = "".join(chr(max(token, 0)) for token in tokens[:position])  # a failed row goes on with -1 for a step
    prompt, _, spoken = text.rpartition("\n")
    command, _, rest = prompt.rpartition("\n")[2].partition(" ")
    if command == "say":
        return ord(rest[len(spoken)]) if len(spoken) < len(rest) else EOS
    if command == "fail" and len(spoken) == 3:
        raise RowFailure("this row cannot be sampled")
    if command == "crash" and len(spoken) == 3:
        raise RuntimeError("the device is gone")
    return letters(tokens, position)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on uvloop, as the server does."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


@dataclass
class Live:
    """A running server."""

    server: RunningServer

    @property
    def state(self) -> ServerState:
        return self.server.state

    @property
    def engine(self) -> AsyncEngine:
        return self.state.engine

    @property
    def http_url(self) -> str:
        return self.server.url

    @property
    def url(self) -> str:
        return self.http_url.replace("http", "ws") + "/v1/responses"

    @property
    def port(self) -> int:
        return int(self.http_url.rpartition(":")[2])

    @property
    def protocols(self) -> list[WebSocketProtocol]:
        connections = self.server._server.server_state.connections
        return [protocol for protocol in connections if isinstance(protocol, WebSocketProtocol)]

    def connect(self, **options: Any) -> connect:
        return connect(self.url, compression=None, proxy=None, max_size=None, **options)

    async def lose_connections(self, timeout_s: float = 10.0) -> None:
        """Wait until every session has ended."""
        deadline = time.monotonic() + timeout_s
        while self.state._connections:
            assert time.monotonic() < deadline, f"{len(self.state._connections)} sessions are left"
            await asyncio.sleep(0.005)

    async def become_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until the engine has no request and no step on its way; then nothing may be held."""
        steps = self.engine._steps
        assert steps is not None
        deadline = time.monotonic() + timeout_s
        while self.engine.stats().num_open or steps.scheduler.num_in_flight:
            assert time.monotonic() < deadline, f"not idle: {self.engine.stats()}"
            await asyncio.sleep(0.005)
        steps.scheduler.check_integrity()
        pages = self.engine.stats().scheduler
        assert pages.num_running == pages.num_waiting == 0


@asynccontextmanager
async def scripted_engine(
    script: Any = obey, *, step_time_s: float | None = 0.0, limits: Limits = LIMITS, tokenizer: Any = None
) -> AsyncIterator[AsyncEngine]:
    runner = ScriptedRunner(limits, script, step_time_s=step_time_s)
    config = EngineConfig(served_model_name=MODEL, trace_file=str(Path(tempfile.gettempdir()) / "aserve-trace.jsonl"))
    async with make_engine(config, runner=runner, tokenizer=tokenizer or ServedTokenizer()) as engine:
        yield engine


@asynccontextmanager
async def live_server(engine: AsyncEngine, **settings: Any) -> AsyncIterator[Live]:
    """Serve on a free port, as the command does; at the end nothing may be left open."""
    config = Config(server=ServerConfig(**{"port": 0, **settings}))
    async with running_server(config, engine) as server:
        yield Live(server)
    assert not server.state._connections
    assert not len(server.state.heartbeat)


@asynccontextmanager
async def scripted_server(
    script: Any = obey, *, step_time_s: float | None = 0.0, limits: Limits = LIMITS, **settings: Any
) -> AsyncIterator[Live]:
    async with (
        scripted_engine(script, step_time_s=step_time_s, limits=limits) as engine,
        live_server(engine, **settings) as live,
    ):
        yield live


def check_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return ``event`` if the official SDK's type for it accepts it."""
    EVENT_TYPES[event["type"]].model_validate(event)
    return event


async def send(socket: ClientConnection, kind: str = "response.create", **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


def in_one_write(socket: ClientConnection, *messages: dict[str, Any]) -> None:
    """Send frames that reach the server in one segment."""
    for message in messages:
        socket.protocol.send_text(json.dumps(message).encode())
    socket.transport.write(b"".join(socket.protocol.data_to_send()))


async def receive(socket: ClientConnection) -> dict[str, Any]:
    text = await socket.recv()
    assert isinstance(text, str), "the server sent a binary frame"
    return check_event(json.loads(text))


async def receive_until(socket: ClientConnection, *kinds: str) -> list[dict[str, Any]]:
    """Return all events up to the first of one of ``kinds``."""
    events = []
    while not events or events[-1]["type"] not in kinds:
        events.append(await receive(socket))
    return events


async def respond(socket: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    """Send one ``response.create`` and return its events."""
    await send(socket, **fields)
    return await receive_until(socket, *TERMINAL)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
