"""POST /v1/responses: the place of the Responses API over HTTP, which is not served yet."""

from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from aserve.errors import ClientError


def http_responses_routes() -> list[BaseRoute]:
    """Return the routes of the Responses API over HTTP."""
    return [Route("/v1/responses", RefusedResponses(), methods=["POST"])]


class RefusedResponses:
    """Refuses with the way that works. 400 rather than 501: official clients send again what failed with 5xx."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise ClientError."""
        raise ClientError(
            "the Responses API is served over a WebSocket at this same path; over HTTP use /v1/chat/completions",
            code="unsupported",
        )
