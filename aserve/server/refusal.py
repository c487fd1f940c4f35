"""Answers that need no endpoint: an error for an HTTP request, or for a WebSocket before it is accepted."""

from collections.abc import Iterable
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from aserve.server.errors import report_error
from aserve.server.messages.errors import is_messages_path, messages_error

REFUSAL_EXTENSION = "websocket.http.response"
POLICY_VIOLATION = 1008


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header called ``name`` (lower case)."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), None)


async def refuse(scope: Scope, receive: Receive, send: Send, error: BaseException) -> None:
    """Answer with ``error`` in the shape of the path's protocol; a WebSocket gets it as the answer to its handshake."""
    report = report_error(error)
    is_messages = is_messages_path(scope)
    body = orjson.dumps(messages_error(report, scope["state"]["request_id"]) if is_messages else report.body())
    is_websocket = scope["type"] == "websocket"
    if is_websocket and REFUSAL_EXTENSION not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        return
    prefix = "websocket.http" if is_websocket else "http"
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *report.headers()]
    if header(scope, b"expect") is not None:  # the client may send the body or not; nobody could tell where it ends
        headers.append((b"connection", b"close"))
    start: dict[str, Any] = {"type": f"{prefix}.response.start", "status": report.status, "headers": headers}
    await send(start)
    await send({"type": f"{prefix}.response.body", "body": body})
