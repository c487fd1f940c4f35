"""From an exception to what a client sees, in one place for HTTP, SSE and WebSocket.

The shape is OpenAI's: ``{"error": {"message", "type", "param", "code"}}``.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aserve.errors import AserveError, CapacityError, ClientError, EngineDeadError

logger = logging.getLogger(__name__)


class UnauthorizedError(ClientError):
    """No API key, or a wrong one."""

    status = 401


class ForbiddenError(ClientError):
    """A browser page of another origin."""

    status = 403


class MethodNotAllowedError(ClientError):
    """The path exists, but not with this method; ``allowed`` are those it has, separated by commas."""

    status = 405

    def __init__(self, allowed: str) -> None:
        super().__init__(f"this path takes {allowed} only", code="method_not_allowed")
        self.allowed = allowed


class BodyTooLargeError(ClientError):
    """The body has more bytes than the server takes."""

    status = 413


def type_error(name: str, expected: str, value: object) -> ClientError:
    """Return the error for a field of the wrong type."""
    message = f"{name} must be of type {expected}, got {type(value).__name__}"
    return ClientError(message, param=name, code="invalid_type")


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Name ``param`` in errors of the tokenizer and the engine, which do not know what the client calls its prompt."""
    try:
        yield
    except ClientError as error:
        if error.param in (None, "prompt", "messages"):
            error.param = param
        raise


TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """What a client learns about an error."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    allowed_methods: str | None = None

    def body(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def event_error(self) -> dict[str, Any]:
        """Return the ``error`` of a WebSocket's error event, which has the response headers in it."""
        headers = {name.decode(): value.decode() for name, value in self.headers()}
        return {**self.body()["error"], **({"headers": headers} if headers else {})}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers that belong to it."""
        named = ((b"retry-after", self.retry_after_s), (b"allow", self.allowed_methods))
        return [(name, str(value).encode()) for name, value in named if value is not None]


def report_error(error: BaseException) -> ErrorReport:
    """Return what a client may know of ``error``; anything unexpected is logged here and stays in the log."""
    if isinstance(error, ClientError):
        kind = TYPES.get(error.status, "invalid_request_error")
        allowed = error.allowed if isinstance(error, MethodNotAllowedError) else None
        return ErrorReport(error.status, error.message, kind, error.param, error.code, allowed_methods=allowed)
    if isinstance(error, CapacityError):
        code = "rate_limit_exceeded" if error.status == 429 else "service_unavailable"
        return ErrorReport(
            error.status, error.message, TYPES[error.status], code=code, retry_after_s=error.retry_after_s
        )
    if isinstance(error, EngineDeadError):
        return ErrorReport(500, str(error), TYPES[500], code="engine_error")
    if isinstance(error, AserveError):
        return ErrorReport(500, str(error), TYPES[500])
    logger.error("unexpected error while answering a request", exc_info=error)
    return ErrorReport(500, "internal server error", TYPES[500], code="internal_error")
