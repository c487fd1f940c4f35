"""What every request passes through besides the gates: an id, a log line, readiness, and the last catch of errors."""

import asyncio
import logging
import re
import time
from collections.abc import Collection
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve.errors import AserveError, CapacityError, ClientError, NotFoundError
from aserve.server.errors import MethodNotAllowedError
from aserve.server.json_body import ClientGoneError
from aserve.server.messages.errors import is_messages_path
from aserve.server.refusal import header, refuse
from aserve.server.state import ServerState

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
QUIET_PATHS = ("/health", "/ready", "/metrics")  # asked for every few seconds


class RequestIds:
    """Gives each request an id, the client's own if it sent a sound one, and logs how it was answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the id into ``scope["state"]["request_id"]`` and the header in which the path's clients look for it."""
        given = header(scope, b"x-request-id")
        request_id = given if given and REQUEST_ID.fullmatch(given) else uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        started_s = time.monotonic()
        status = 0
        id_headers = [(b"x-request-id", request_id)]
        if is_messages_path(scope):
            id_headers.append((b"request-id", request_id))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                status = message.get("status", 101)
                message = {**message, "headers": [*message.get("headers", ()), *id_headers]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            logger.log(
                level,
                "%s %s %s %.1f ms %s",
                scope.get("method", "WEBSOCKET"),
                ascii(scope["path"][:128])[1:-1],
                status or "no answer",
                1e3 * (time.monotonic() - started_s),
                request_id.decode(),
            )


class ReadyGate:
    """Refuses the API while the model loads, after a failure and while the server drains."""

    def __init__(self, app: ASGIApp, state: ServerState, open_paths: Collection[str]) -> None:
        self._app = app
        self._state = state
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it with 503."""
        if scope["path"] not in self._open_paths:
            self._state.check_ready()
        await self._app(scope, receive, send)


class ErrorCatch:
    """Turns what escapes into an answer of the protocol's shape; once a response has begun, cuts it off instead."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application and answer in its place if it raises."""
        has_begun = False

        async def send_watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except ClientGoneError:
            return
        except HTTPException as error:
            await refuse(scope, receive, send, _from_http(error))
        except asyncio.CancelledError:  # only a server that shuts down cancels a request's task
            if has_begun:
                raise
            await refuse(scope, receive, send, CapacityError("the server is shutting down"))
        except Exception as error:
            if has_begun:
                raise  # uvicorn logs it and closes the connection
            await refuse(scope, receive, send, error)


def _from_http(error: HTTPException) -> AserveError:
    """Return ours for what Starlette's router raises."""
    if error.status_code == 405:
        return MethodNotAllowedError((error.headers or {})["Allow"])
    if error.status_code == 404:
        return NotFoundError("there is nothing at this path; /openapi.json lists what there is", code="not_found")
    return ClientError(str(error.detail))
