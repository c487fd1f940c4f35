"""Anthropic's shape of errors: ``{"type": "error", "error": {"type", "message", "details"}, "request_id"}``.

It has no field for the parameter at fault, so the message names it; ``details`` are there for errors with a code.
"""

from typing import Any

from starlette.types import Scope

from aserve.server.errors import ErrorReport

PREFIX = "/v1/messages"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_messages_path(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's protocol."""
    path: str = scope["path"]
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def messages_error(report: ErrorReport, request_id: str) -> dict[str, Any]:
    """Return the JSON form of ``report``."""
    kind = TYPES.get(report.status, "api_error" if report.status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": _naming(report)}
    if report.code is not None:
        error["details"] = {"error_code": report.code}
    return {"type": "error", "error": error, "request_id": request_id}


def _naming(report: ErrorReport) -> str:
    if report.param is None or report.param in report.message:
        return report.message
    return f"{report.param}: {report.message}"
