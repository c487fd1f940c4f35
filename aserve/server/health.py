"""GET /health, /ready, /metrics and /version."""

import orjson
from starlette.types import Receive, Scope, Send

from aserve import __version__
from aserve.errors import AserveError
from aserve.server.errors import report_error
from aserve.server.generation import send_json
from aserve.server.state import ServerState

STUCK_FACTOR = 2  # in units of ``step_timeout_s``


class Health:
    """Alive: 200 while it makes sense to wait, also while the model loads; a supervisor restarts on 503.

    That is: the engine has failed, or one step has taken ``STUCK_FACTOR`` times as long as turns readiness off.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        engine = self._state.engine
        if not engine.is_alive:
            status = "failed"
        elif engine.step_wait_s > STUCK_FACTOR * engine.config.step_timeout_s:
            status = "stuck"
        else:
            status = "ok"
        await send_json(send, orjson.dumps({"status": status}), status=200 if status == "ok" else 503)


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
