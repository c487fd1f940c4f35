"""GET /health, /ready, /metrics and /version."""

import orjson
from starlette.types import Receive, Scope, Send

from aserve import __version__
from aserve.errors import AserveError
from aserve.server.errors import report_error
from aserve.server.generation import send_json
from aserve.server.state import ServerState


class Health:
    """Alive: 200 unless the engine has failed. Says nothing about readiness; a supervisor restarts on it."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        is_alive = self._state.engine.is_alive
        body = orjson.dumps({"status": "ok" if is_alive else "failed"})
        await send_json(send, body, status=200 if is_alive else 503)


class Ready:
    """Ready: 200 while requests are served, else 503 with the reason; a balancer sends traffic by it."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            self._state.check_ready()
        except AserveError as error:
            report = report_error(error)
            await send_json(send, orjson.dumps(report.body()), status=503, headers=report.headers())
        else:
            await send_json(send, b'{"status":"ready"}')


class MetricsPage:
    """The Prometheus page."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        metrics = self._state.engine.metrics
        body = metrics.render()
        headers = [(b"content-type", metrics.content_type.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def show_version(scope: Scope, receive: Receive) -> dict[str, str]:
    """Return the version of aserve."""
    return {"version": __version__}
