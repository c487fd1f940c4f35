"""The ASGI application: routes, and around them the gates in their order."""

from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from aserve.config import Config
from aserve.engine.async_engine import AsyncEngine
from aserve.server.auth import KeyGate
from aserve.server.chat_page import static_routes
from aserve.server.completions.chat import ChatCompletions
from aserve.server.completions.completions import Completions
from aserve.server.health import Health, MetricsPage, Ready, show_version
from aserve.server.messages.endpoints import messages_routes
from aserve.server.middleware import ErrorCatch, ReadyGate, RequestIds
from aserve.server.models import JsonEndpoint, detokenize, list_models, show_model, tokenize
from aserve.server.openapi import show_api
from aserve.server.origin import OriginGate
from aserve.server.responses.endpoints import responses_routes
from aserve.server.responses.http_endpoints import http_responses_routes
from aserve.server.state import ServerState
from aserve.server.unchunked import UnchunkedBodies

PROBES = ("/health", "/ready")
DOCUMENT = "/openapi.json"
WITHOUT_MODEL = ("/metrics", "/version", DOCUMENT)


def create_app(engine: AsyncEngine, config: Config, state: ServerState | None = None) -> Starlette:
    """Return the application that serves ``engine``; ``state`` is made here unless the caller has one."""
    state = state or ServerState(engine, config)
    pages = static_routes()
    open_paths = {*PROBES, *(page.path for page in pages if isinstance(page, Route))}
    app = Starlette(
        routes=[
            *_probes(state),
            *api_routes(state),
            *pages,
        ],
        middleware=[
            Middleware(UnchunkedBodies),
            Middleware(RequestIds),
            Middleware(OriginGate, config.server.allowed_origins),
            Middleware(KeyGate, config.server.api_key, open_paths),
            Middleware(ErrorCatch),
            Middleware(ReadyGate, state, open_paths.union(WITHOUT_MODEL)),
        ],
        exception_handlers={HTTPException: _raise_again},
    )
    app.router.redirect_slashes = False
    return app


def api_routes(state: ServerState) -> list[BaseRoute]:
    """Return the endpoints of the API itself, without gates."""
    return [
        *_model_api(state),
        *messages_routes(state),
        *responses_routes(state),
        *http_responses_routes(state),
    ]


def _probes(state: ServerState) -> list[BaseRoute]:
    return [
        Route("/health", Health(state), methods=["GET"]),
        Route("/ready", Ready(state), methods=["GET"]),
        Route("/metrics", MetricsPage(state), methods=["GET"]),
        Route("/version", JsonEndpoint(show_version), methods=["GET"]),
        Route(DOCUMENT, JsonEndpoint(partial(show_api, state)), methods=["GET"]),
    ]


def _model_api(state: ServerState) -> list[BaseRoute]:
    return [
        Route("/v1/chat/completions", ChatCompletions(state), methods=["POST"]),
        Route("/v1/completions", Completions(state), methods=["POST"]),
        Route("/v1/models", JsonEndpoint(partial(list_models, state)), methods=["GET"]),
        Route("/v1/models/{model:path}", JsonEndpoint(partial(show_model, state)), methods=["GET"]),
        Route("/tokenize", JsonEndpoint(partial(tokenize, state)), methods=["POST"]),
        Route("/detokenize", JsonEndpoint(partial(detokenize, state)), methods=["POST"]),
    ]


async def _raise_again(request: Request, error: Exception) -> Response:
    """Leave the router's errors to ErrorCatch, which gives them the protocol's shape."""
    raise error
