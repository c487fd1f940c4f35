"""The chat page at ``/`` and its files: read once, sent with headers that let nothing in from elsewhere."""

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",  # a WebSocket to the page's own host is 'self', too
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


def static_routes() -> list[BaseRoute]:
    """Return the routes of the page; each file has its own, so that no path is ever built from a request."""
    pages = {entry.name: StaticFile(entry.name, entry.read_bytes()) for entry in _static_files()}
    routes: list[BaseRoute] = [Route(f"/static/{name}", page.respond) for name, page in pages.items()]
    return [Route("/", pages["index.html"].respond), *routes]


def _static_files() -> list[Traversable]:
    folder = files("aserve.server").joinpath("static")
    return [entry for entry in folder.iterdir() if PurePosixPath(entry.name).suffix in MEDIA_TYPES]


class StaticFile:
    """One file in memory, revalidated by its hash."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._headers = {
            "content-type": MEDIA_TYPES[PurePosixPath(name).suffix],
            "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
            "cache-control": "no-cache",
            "content-security-policy": CONTENT_SECURITY_POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }

    async def respond(self, request: Request) -> Response:
        """Answer GET and HEAD; 304 if the browser has this version."""
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)
