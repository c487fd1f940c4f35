"""The HTTP API's requests and answers without HTTP, for programs that have the engine in their own process."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self
from uuid import uuid4

import orjson
from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import Message

from aserve.config import Config, ServerConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.errors import CapacityError, ClientError
from aserve.server.app import api_routes
from aserve.server.local_transport import LocalTransport
from aserve.server.state import ServerState
from aserve.server.transport import EXTENSION

DATA, DONE = b"data: ", b"[DONE]"


class LocalClient:
    """Takes the bodies of every endpoint under /v1, and gives what these answer, as Python values.

        async with AsyncEngine(EngineConfig()) as engine, LocalClient(engine) as client:
            answer = await client.request("/v1/chat/completions", {"messages": [...], "max_tokens": 50})
            async for event in client.stream("/v1/responses", {"input": "Hello"}):
                ...

    ``model`` may be left out of a body. What is wrong with a request is raised as in the engine's own calls (see
    ``aserve.errors``), unless a stream has begun: then its last event says it, as over HTTP. Use it on the engine's
    event loop.
    """

    def __init__(self, engine: AsyncEngine, settings: ServerConfig | None = None) -> None:
        """``settings`` are those of the API itself, such as ``response_store``; ports and keys have no meaning here."""
        self._state = ServerState(engine, Config(server=settings or ServerConfig()))
        self._router = Router(api_routes(self._state), redirect_slashes=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._state.is_draining = True
        self._state.shut_down(CapacityError("the client is closed"))
        await self._state.close()

    async def request(
        self, path: str, body: Mapping[str, Any] | None = None, *, method: str | None = None, query: str = ""
    ) -> Any:
        """Return the answer to ``body``, as read from its JSON; GET without a body, else POST, unless told otherwise.

        Cancelling aborts what was asked for.
        """
        transport, pieces = LocalTransport(), list[bytes]()
        try:
            await self._call(transport, pieces, path, body, method or ("GET" if body is None else "POST"), query)
        finally:
            transport.close()
        return orjson.loads(b"".join(pieces))

    async def stream(
        self, path: str, body: Mapping[str, Any] | None = None, *, query: str = ""
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a streamed answer; ``"stream": true`` is added to ``body``.

        Leaving the iteration (``aclose``) ends the request as a client's leaving does. Without a body it is a GET, for
        responses that are taken up again. A reader that is behind gets larger deltas.
        """
        transport = LocalTransport()
        fields, method = (None, "GET") if body is None else ({**body, "stream": True}, "POST")
        answering = asyncio.create_task(self._call(transport, [], path, fields, method, query))
        answering.add_done_callback(lambda _: transport.finish())
        try:
            async for frame in transport.frames():
                for event in _events(frame):
                    yield event
            await answering
        finally:
            transport.close()
            answering.cancel()
            with suppress(asyncio.CancelledError, Exception):  # raised above, unless the reader has left
                await answering

    async def _call(
        self,
        transport: LocalTransport,
        pieces: list[bytes],
        path: str,
        body: Mapping[str, Any] | None,
        method: str,
        query: str,
    ) -> None:
        self._state.check_ready()
        payload = b"" if body is None else orjson.dumps(body)
        messages: list[Message] = [{"type": "http.request", "body": payload, "more_body": False}]
        has_left = asyncio.Event()
        transport.on_close(has_left.set)

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            pieces.append(message.get("body", b""))

        scope = {  # with an "app" the router raises for an unknown path, and does not answer
            "type": "http", "method": method, "path": path, "root_path": "", "query_string": query.encode(),
            "headers": [(b"content-type", b"application/json")], "extensions": {EXTENSION: transport}, "app": self,
            "state": {"request_id": uuid4().hex},
        }  # fmt: skip
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            raise ClientError(f"{method} {path}: {error.detail}", code="not_found") from None


def _events(frame: bytes) -> Iterator[dict[str, Any]]:
    for line in frame.split(b"\n"):
        if line.startswith(DATA) and line[len(DATA) :] != DONE:
            yield orjson.loads(line[len(DATA) :])
