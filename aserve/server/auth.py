"""The gate in front of every route: nothing passes without the key but what an explicit list names.

A pure ASGI middleware, so that WebSockets pass through it like everything else, before they are accepted.
"""

import hashlib
import hmac
from collections.abc import Collection, Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from aserve.server.errors import UnauthorizedError
from aserve.server.refusal import header, refuse

KEY_SUBPROTOCOL = "openai-insecure-api-key."  # how a browser, which can set no header, sends a key on a WebSocket


class KeyGate:
    """Lets requests pass that carry the key, and reads of ``open_paths``. Without a key everything passes.

    Open paths are compared with the path as it was sent: a spelling that decodes or normalises to one of them is
    another path.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, open_paths: Collection[str]) -> None:
        self._app = app
        self._digest = None if api_key is None else _digest(api_key.encode())
        self._open_paths = frozenset(path.encode() for path in open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it with 401."""
        if self._digest is None or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError(
            "a valid API key is required: Authorization: Bearer KEY, or X-Api-Key: KEY", code="invalid_api_key"
        )
        await refuse(scope, receive, send, error)

    def _is_open(self, scope: Scope) -> bool:
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        return is_read and scope["raw_path"] in self._open_paths

    def _has_key(self, scope: Scope) -> bool:
        return any(hmac.compare_digest(_digest(given), self._digest or b"") for given in _given_keys(scope))


def _given_keys(scope: Scope) -> Iterator[bytes]:
    scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        yield key.strip()
    if key := (header(scope, b"x-api-key") or b"").strip():
        yield key
    if scope["type"] == "websocket":
        for protocol in scope.get("subprotocols", ()):
            if protocol.startswith(KEY_SUBPROTOCOL):
                yield str(protocol).removeprefix(KEY_SUBPROTOCOL).encode()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
