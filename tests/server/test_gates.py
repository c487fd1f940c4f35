"""Nothing passes the gates without the key, whatever the spelling of the path; and no page of a foreign origin does."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import pytest
from doubles_http import Live, in_loop, live_server
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from aserve.config import Config
from aserve.engine.async_engine import AsyncEngine
from aserve.server.app import create_app

KEY = "a-long-secret-key"
WRONG_KEYS = (None, "Bearer", "Bearer ", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer \xff")
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": base64.b64encode(b"x" * 16).decode(),
}


def paths() -> list[str]:
    """Return every path that the application has a route for."""
    routes = create_app(AsyncEngine(), Config()).routes
    assert all(isinstance(route, Route | WebSocketRoute) for route in routes), "a new kind of route needs a test here"
    return sorted({route.path.replace("{model:path}", "scripted") for route in routes})  # type: ignore[attr-defined]


OPEN = {path for path in paths() if path in ("/", "/health", "/ready") or path.startswith("/static/")}


def spellings(path: str) -> Iterator[str]:
    yield path
    yield f"/{path}"
    yield f"{path}/"
    yield f"/.{path}"
    yield f"/%2e{path}"
    yield f"/x/..{path}"
    yield f"/x/%2e%2e{path}"
    yield path.upper()
    yield f"/%{ord(path[1:2] or '/'):02x}{path[2:]}"
    yield f"{path};x"
    yield f"{path}%00"
    yield f"/health/..{path}"
    yield f"/static/..{path}"
    yield f"/static/%2e%2e{path}"


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the paths with which the router, behind all gates, is called."""
    seen: list[str] = []
    original = Router.__call__

    async def record(self: Router, scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(f"{scope['type']} {scope['path']}")
        await original(self, scope, receive, send)

    monkeypatch.setattr(Router, "__call__", record)
    return seen


async def raw(live: Live, path: str, method: str = "GET", **headers: str | None) -> int:
    """Return the status of a request whose path is sent as it is."""
    reader, writer = await asyncio.open_connection(*live.address)
    lines = [f"{method} {path} HTTP/1.1", f"Host: {headers.pop('Host', 'test')}"]
    lines.append("Content-Length: 2" if method == "POST" else "Accept: */*")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value is not None]
    writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (b"{}" if method == "POST" else b""))
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


@in_loop
async def test_no_route_is_reached_without_the_key(reached: list[str]) -> None:
    async with live_server(api_key=KEY) as live:
        for path in paths():
            for spelling in spellings(path):
                for kind in ("GET", "POST", "socket"):
                    headers = UPGRADE if kind == "socket" else {}
                    status = await raw(live, spelling, "POST" if kind == "POST" else "GET", **headers)
                    if spelling in OPEN and kind == "GET":
                        assert status in (200, 503), spelling
                        reached.clear()
                    else:
                        assert status in (401, 403), (kind, spelling, status)
        assert reached == []


@in_loop
async def test_no_wrong_key_passes_and_the_right_one_does(reached: list[str]) -> None:
    async with live_server(api_key=KEY) as live:
        for key in WRONG_KEYS:
            for path in ("/v1/models", "/metrics", "/version", "/tokenize", "/v1/responses", "/nothing"):
                assert await raw(live, path, Authorization=key) == 401
                assert await raw(live, path, Authorization=key, **UPGRADE) == 401
        assert reached == []
        for key in (f"Bearer {KEY}", f"bearer  {KEY}"):
            assert await raw(live, "/v1/models", Authorization=key) == 200
            assert await raw(live, "/v1/responses", Authorization=key, **UPGRADE) == 101
        answer = await live.http.get("/v1/models")
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["x-request-id"]


@in_loop
async def test_a_browser_sends_the_key_as_a_subprotocol() -> None:
    async with live_server(api_key=KEY) as live:
        url = live.url.replace("http", "ws") + "/v1/responses"
        offers: Any = ["aserve", f"openai-insecure-api-key.{KEY}"]
        async with connect(url, subprotocols=offers, proxy=None) as socket:
            assert socket.subprotocol == "aserve"
        for wrong in (["aserve"], ["openai-insecure-api-key."], [f"openai-insecure-api-key.{KEY}x"]):
            with pytest.raises(InvalidStatus) as caught:
                await connect(url, subprotocols=wrong, proxy=None)  # type: ignore[arg-type]
            assert caught.value.response.status_code == 401


OWN = "http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("origin", "allowed", "passes"),
    [
        (None, (), True),
        (OWN, (), True),
        ("http://evil.example", (), False),
        ("null", (), False),
        ("", (), False),
        ("http://[", (), False),
        ("http://127.0.0.1:1", (), False),
        ("http://127.0.0.1", (), False),
        ("https://app.example", ("https://app.example",), True),
        ("https://APP.example", ("https://app.example/",), True),
        ("http://app.example", ("https://app.example",), False),
        ("https://app.example.evil", ("https://app.example",), False),
        ("https://any.example", ("*",), True),
        ("null", ("*",), True),
    ],
)
@in_loop
async def test_only_pages_of_allowed_origins_pass(
    origin: str | None, allowed: tuple[str, ...], passes: bool, reached: list[str]
) -> None:
    async with live_server(allowed_origins=allowed) as live:
        host, port = live.address
        origin = origin and origin.format(port=port)
        headers = {} if origin is None else {"Origin": origin}
        for extra in ({}, UPGRADE):
            path = "/v1/responses" if extra else "/v1/models"
            status = await raw(live, path, **{"Host": f"{host}:{port}"}, **headers, **extra)
            if passes:
                assert status in (200, 101)
            else:
                assert status == 403
        assert bool(reached) == passes


@in_loop
async def test_a_name_that_was_bound_to_a_loopback_address_is_not_its_own(reached: list[str]) -> None:
    async with live_server() as live:
        answer = await live.http.get(
            "/v1/models", headers={"host": "rebound.example", "origin": "http://rebound.example"}
        )
        assert answer.status_code == 403
        local = {"host": "localhost:8000", "origin": "http://localhost:8000"}
        assert (await live.http.get("/v1/models", headers=local)).status_code == 200


@in_loop
async def test_pages_may_ask_first_and_may_read_the_answer() -> None:
    async with live_server(allowed_origins=("https://app.example",), api_key=KEY) as live:
        origin = {"origin": "https://app.example"}
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-a"}
        answer = await live.http.options("/v1/chat/completions", headers={**origin, **asked})
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["access-control-allow-headers"] == "authorization,x-a"
        assert "POST" in answer.headers["access-control-allow-methods"]
        for key, status in ((KEY, 200), ("x", 401)):
            headers = {**origin, "authorization": f"Bearer {key}"}
            answer = await live.http.get("/v1/models", headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["vary"] == "Origin"
        assert (await live.http.options("/v1/chat/completions")).status_code == 401


@in_loop
async def test_every_answer_carries_the_request_id() -> None:
    async with live_server() as live:
        for path in ("/health", "/v1/models", "/nothing"):
            answer = await live.http.get(path, headers={"x-request-id": "mine-1"})
            assert answer.headers["x-request-id"] == "mine-1"
        ids = {(await live.http.get("/health")).headers["x-request-id"] for _ in range(3)}
        assert len(ids) == 3
        for wrong in ("a b", "x" * 129, "ž".encode()):
            sent = await live.http.get("/health", headers=[(b"x-request-id", wrong)])  # type: ignore[list-item]
            assert len(sent.headers["x-request-id"]) == 32
        answer = await live.chat(stream=True, max_tokens=2)
        assert answer.headers["x-request-id"]


@in_loop
async def test_unknown_paths_and_methods_get_the_official_shape() -> None:
    async with live_server() as live:
        for method, path, status, allowed in (
            ("GET", "/nothing", 404, None),
            ("GET", "/v1/chat/completions", 405, {"POST"}),
            ("POST", "/v1/models", 405, {"GET", "HEAD"}),
            ("POST", "/health", 405, {"GET", "HEAD"}),
            ("GET", "/v1/models/", 404, None),
            ("DELETE", "/v1/models/x", 405, {"GET", "HEAD"}),
            ("PUT", "/v1/responses/resp_x", 405, {"DELETE", "GET", "HEAD"}),
            ("GET", "/static/../app.py", 404, None),
        ):
            answer = await live.http.request(method, path)
            assert answer.status_code == status, path
            assert ("allow" in answer.headers) == (allowed is not None)
            assert allowed is None or set(answer.headers["allow"].split(", ")) == allowed
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (await live.http.head("/health")).status_code == 200
