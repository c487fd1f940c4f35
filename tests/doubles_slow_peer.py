"""A WebSocket session whose peer reads when a test wants it to."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from doubles_socket import check_event, live_server

from aserve.engine.async_engine import AsyncEngine
from aserve.server.responses.session import ResponsesSession


class SlowPeer:
    """A WebSocket whose peer reads when it is told to."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.is_writable = True
        self.is_closed = False
        self._on_writable: Callable[[], None] | None = None

    def write_frame(self, payload: bytes) -> None:
        self.events.append(check_event(json.loads(payload)))

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self._on_writable = callback

    def on_close(self, callback: Callable[[], None]) -> None:
        pass

    def abort(self) -> None:
        self.is_closed = True

    def close(self, code: int, reason: str = "") -> None:
        self.is_closed = True

    async def drain(self) -> None:
        pass

    def read(self) -> None:
        self.is_writable = True
        assert self._on_writable is not None
        self._on_writable()


@asynccontextmanager
async def slow_peer(engine: AsyncEngine) -> AsyncIterator[tuple[ResponsesSession, SlowPeer]]:
    peer = SlowPeer()
    async with live_server(engine) as live, asyncio.TaskGroup() as tasks:
        session = ResponsesSession(live.state, peer, tasks)
        yield session, peer
        session.close()


async def say(session: ResponsesSession, kind: str = "response.create", **fields: Any) -> None:
    await session.receive(json.dumps({"type": kind, **fields}))
