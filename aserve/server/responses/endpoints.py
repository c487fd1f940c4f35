"""The WebSocket endpoint ``/v1/responses``: handshake and read loop; the rest is in ``responses_session.py``."""

import asyncio
from typing import Any, cast

from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from aserve.server.auth import KEY_SUBPROTOCOL
from aserve.server.responses.session import ResponsesSession, SocketTransport
from aserve.server.state import ServerState
from aserve.server.transport import EXTENSION

UNSUPPORTED_DATA = 1003


def responses_routes(state: ServerState) -> list[BaseRoute]:
    """Return the routes of the Responses API."""
    return [WebSocketRoute("/v1/responses", ResponsesSocket(state))]


class ResponsesSocket:
    """Serves one WebSocket per call, as an ASGI application."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept the connection and serve it until it closes."""
        websocket = WebSocket(scope, receive, send)
        transport = cast(SocketTransport, scope["extensions"][EXTENSION])
        await websocket.accept(subprotocol=select_protocol(scope["subprotocols"]))
        async with asyncio.TaskGroup() as tasks:
            session = ResponsesSession(self._state, transport, tasks)
            self._state.register(session)
            self._state.heartbeat.add(session.outlet)
            try:
                await read_messages(websocket, session, transport)
            finally:
                self._state.heartbeat.remove(session.outlet)
                self._state.unregister(session)
                session.close()


async def read_messages(websocket: WebSocket, session: ResponsesSession, transport: SocketTransport) -> None:
    """Hand messages to ``session`` until the connection closes; a peer that does not read is not read from either."""
    while True:
        message: dict[str, Any] = dict(await websocket.receive())
        if message["type"] == "websocket.disconnect":
            return
        if message.get("text") is None:
            transport.close(UNSUPPORTED_DATA, "only text messages are understood")
            return
        await session.receive(message["text"])
        await transport.drain()


def select_protocol(offered: list[str]) -> str | None:
    """Return the first offered subprotocol that is not a key: browsers want one of their offers selected."""
    # The one that carries a browser's key is never repeated in the answer.
    return next((name for name in offered if not name.startswith(KEY_SUBPROTOCOL)), None)
