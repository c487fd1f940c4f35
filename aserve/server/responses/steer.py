"""``response.steer``: user input for a response that runs, which an automatic successor takes up; no I/O, no engine.

    response.steer ──> steer.accepted ──> response.incomplete (steered) ──> response.created of the successor

Input that was accepted ends in that ``response.created`` or in ``response.steer.failed``, which hands it back. If the
response calls tools, it ends by itself, ``response.steer.pending`` says whose results are wanted, and the client's
continuation with these is the successor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from aserve.errors import ClientError
from aserve.server.errors import type_error
from aserve.server.responses.input import read_input
from aserve.server.responses.items import Item

MAX_ID_CHARS = 256

ACCEPTED = "response.steer.accepted"
FAILED = "response.steer.failed"
PENDING = "response.steer.pending"


class SteerError(ClientError):
    """Input that cannot be taken up; ``code`` is one of the protocol's codes for this."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message, code=code)
        self.reason = code


@dataclass(frozen=True, slots=True)
class Steer:
    """One ``response.steer``: the response that it names, its input as it came, and the length of its message."""

    steer_id: str
    previous_response_id: str
    input: str | list[Any]
    shown_input: bytes  # the same in JSON: deep within an event it might be nested too deeply to be encoded
    num_bytes: int

    @property
    def items(self) -> list[Item]:
        """The input as items; raises SteerError unless it is a string or messages of the user."""
        if isinstance(self.input, list):
            if not self.input:
                raise SteerError("invalid_input", "input must not be an empty list")
            for index, item in enumerate(self.input):
                _check_message(f"input[{index}]", item)
        try:
            return read_input(self.input)
        except ClientError as error:
            raise SteerError("invalid_input", error.message) from error

    def fields(self) -> dict[str, Any]:
        """Return what an event says about it that the server owns."""
        return {"steer": {"id": self.steer_id, "previous_response_id": self.previous_response_id}}

    def failure(self, error: SteerError, *, was_accepted: bool) -> dict[str, Any]:
        """Return what the event says that hands it back."""
        steer = {"previous_response_id": self.previous_response_id, "input": orjson.Fragment(self.shown_input)}
        if was_accepted:
            steer["id"] = self.steer_id
        shown = {"type": "invalid_request_error", "code": error.reason, "message": error.message}
        return {"error": shown, "steer": steer}


def read_steer(message: Mapping[str, Any], steer_id: str, num_bytes: int) -> Steer:
    """Return the steer in ``message``; raise ClientError if it is so malformed that it could not be handed back."""
    previous_id, value = message.get("previous_response_id"), message.get("input")
    if not isinstance(previous_id, str) or len(previous_id) > MAX_ID_CHARS:
        raise ClientError(
            f"previous_response_id must be the id of a response, of at most {MAX_ID_CHARS} characters",
            param="previous_response_id",
            code="invalid_input",
        )
    if not isinstance(value, str | list):
        raise type_error("input", "string or list of messages", value)
    try:
        shown = orjson.dumps(value)
    except TypeError:
        raise ClientError("input is nested too deeply", param="input", code="invalid_input") from None
    return Steer(steer_id, previous_id, value, shown, num_bytes)


def steer_event(name: str, fields: Mapping[str, Any], number: int, stream_id: str | None) -> bytes:
    """Return an event about a response that has no more events of its own."""
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return orjson.dumps({"type": name, **lane, **fields, "sequence_number": number})


def _check_message(name: str, item: object) -> None:
    if not isinstance(item, dict):
        raise SteerError("invalid_input", f"{name} must be an object")
    if item.get("type", "message") != "message" or item.get("role") != "user":
        raise SteerError("invalid_input", f"{name} must be a message with the role 'user'")
