"""Streamed answers for clients of HTTP/1.0, which know no chunks: the end of the connection is that of the body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve.server.http_protocol import BodyTransport
from aserve.server.transport import EXTENSION


class UnchunkedBodies:
    """Passes requests on; a body of unknown length is not chunked unless its client can read that (RFC 9112, 6.1)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        transport = scope.get("extensions", {}).get(EXTENSION)
        if scope.get("http_version") != "1.0" or not isinstance(transport, BodyTransport):
            await self._app(scope, receive, send)
            return

        async def send_unchunked(message: Message) -> None:
            if message["type"] == "http.response.start" and not _has_length(message):
                transport.leave_unchunked()
            await send(message)

        await self._app(scope, receive, send_unchunked)


def _has_length(start: Message) -> bool:
    return any(name.lower() == b"content-length" for name, _ in start.get("headers", ()))
