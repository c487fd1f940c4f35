"""Which browser pages may use the server: its own and those that the settings name.

A page of any site can make a visitor's browser send requests here; the browser then names the page's origin. So
a request with a foreign origin is refused before anything else looks at it, HTTP and WebSocket alike. Clients
that are no browsers send no origin and pass.
"""

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve.server.errors import ForbiddenError
from aserve.server.refusal import header, refuse

EXPOSED = b"x-request-id, request-id, retry-after"
PREFLIGHT_SECONDS = b"600"


class OriginGate:
    """ASGI middleware: checks the origin, answers preflights, and marks answers as readable."""

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._allows_all = "*" in allowed_origins
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, answer its preflight, or refuse it."""
        origin = header(scope, b"origin")
        if origin is None or self._is_own(scope, origin):
            await self._app(scope, receive, send)
        elif not self._allows_all and origin.decode("latin-1").lower() not in self._allowed:
            error = ForbiddenError("pages of this origin may not use this server", code="origin_not_allowed")
            await refuse(scope, receive, send, error)
        elif scope["type"] == "http" and scope["method"] == "OPTIONS":
            await _answer_preflight(scope, origin, send)
        else:
            await self._app(scope, receive, _marking(send, origin))

    def _is_own(self, scope: Scope, origin: bytes) -> bool:
        """True if the page came from the host that it talks to, as far as that proves anything.

        A name that resolves to a loopback address here may be an attacker's (DNS rebinding), so on a loopback
        connection only addresses and localhost count as own.
        """
        try:
            netloc = urlsplit(origin.decode("ascii")).netloc.lower()
            host = urlsplit(origin.decode("ascii")).hostname
        except ValueError:
            return False
        if not netloc or host is None or netloc.encode() != (header(scope, b"host") or b"").lower():
            return False
        return not _is_loopback(scope) or host == "localhost" or _is_address(host)


def _is_loopback(scope: Scope) -> bool:
    host = (scope.get("server") or ("",))[0]
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _answer_preflight(scope: Scope, origin: bytes, send: Send) -> None:
    headers = [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
        (b"access-control-allow-headers", header(scope, b"access-control-request-headers") or b"*"),
        (b"access-control-max-age", PREFLIGHT_SECONDS),
        (b"vary", b"Origin"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _marking(send: Send, origin: bytes) -> Send:
    """Return ``send``, with the headers that let a page of ``origin`` read the answer."""

    async def send_marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            marks = [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", EXPOSED),
                (b"vary", b"Origin"),
            ]
            message = {**message, "headers": [*message.get("headers", ()), *marks]}
        await send(message)

    return send_marked
