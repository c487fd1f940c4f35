"""The events of the Responses API as bytes, in order and numbered; pure: no socket, no engine, no clock.

    created, in_progress, [output_item.added, content_part.added, output_text.delta*, output_text.done,
    content_part.done, output_item.done], completed | incomplete | failed

The same builder serves every transport: what differs is only the framing around the bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from aserve.server.response_schema import ResponseRequest

Logprobs = Sequence[Mapping[str, Any]]


class ResponseStatus(StrEnum):
    """How a response ended, or that it has not."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    CANCELLED = "cancelled"
    FAILED = "failed"


# The protocol has three terminal events; a response that was cancelled is incomplete without a reason.
TERMINAL_EVENTS = {
    ResponseStatus.COMPLETED: "response.completed",
    ResponseStatus.INCOMPLETE: "response.incomplete",
    ResponseStatus.CANCELLED: "response.incomplete",
    ResponseStatus.FAILED: "response.failed",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one response."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Return the ``usage`` object."""
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }


class ResponseEvents:
    """Builds the events of one response; owns its text so far and its sequence number."""

    __slots__ = (
        "_created_at", "_delta_start", "_is_message_open", "_item_id", "_logprobs", "_model", "_place", "_request",
        "_sequence_number", "_stream_id", "_texts", "response_id",
    )  # fmt: skip

    def __init__(
        self,
        request: ResponseRequest,
        *,
        response_id: str,
        item_id: str,
        model: str,
        created_at: int,
        stream_id: str | None = None,
    ) -> None:
        self.response_id = response_id
        self._request = request
        self._item_id = item_id
        self._model = model
        self._created_at = created_at
        self._stream_id = stream_id
        self._sequence_number = 0
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []  # the encoded entries of each delta, without brackets
        self._is_message_open = False
        self._place = {"item_id": item_id, "output_index": 0, "content_index": 0}
        lane = b"" if stream_id is None else b',"stream_id":' + orjson.dumps(stream_id)
        self._delta_start = (
            b'{"type":"response.output_text.delta"' + lane + b"," + orjson.dumps(self._place)[1:-1] + b',"delta":'
        )

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    def opening(self) -> list[bytes]:
        """Return the events that say the response was accepted."""
        response = self._response(ResponseStatus.IN_PROGRESS)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def delta(self, text: str, logprobs: Logprobs = ()) -> list[bytes]:
        """Return the event for new text, after those that open the message if it is the first."""
        events = [] if self._is_message_open else self._open_message()
        self._texts.append(text)
        encoded = b"[]"
        if logprobs:
            encoded = orjson.dumps(logprobs)
            self._logprobs.append(encoded[1:-1])
        number = self._sequence_number
        self._sequence_number = number + 1
        tail = b',"logprobs":%b,"sequence_number":%d}' % (encoded, number)
        events.append(b"".join((self._delta_start, orjson.dumps(text), tail)))
        return events

    def ending(
        self,
        status: ResponseStatus,
        *,
        usage: Usage | None = None,
        completed_at: int | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> list[bytes]:
        """Return the events that close the message, if there is one, and the terminal event.

        A completed response has a message even if its text is empty, unless it was a warm-up.
        """
        events = []
        output = []
        if status is ResponseStatus.COMPLETED and self._request.generate and not self._is_message_open:
            events += self._open_message()
        if self._is_message_open:
            closing, item = self._close_message(status)
            events += closing
            output = [item]
        response = self._response(status, output=output, usage=usage, completed_at=completed_at, error=error)
        events.append(self._event(TERMINAL_EVENTS[status], response=response))
        return events

    def _open_message(self) -> list[bytes]:
        self._is_message_open = True
        item = {"id": self._item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=part),
        ]

    def _close_message(self, status: ResponseStatus) -> tuple[list[bytes], orjson.Fragment]:
        """Return the events and the finished item. Text and log probabilities may be long, so they are encoded once."""
        text = orjson.Fragment(orjson.dumps(self.text))
        logprobs = orjson.Fragment(b"[%b]" % b",".join(self._logprobs))
        part = _encoded({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
        item = _encoded(
            {
                "id": self._item_id,
                "type": "message",
                "status": "completed" if status is ResponseStatus.COMPLETED else "incomplete",
                "role": "assistant",
                "content": [part],
            }
        )
        events = [
            self._event("response.output_text.done", **self._place, text=text, logprobs=logprobs),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]
        return events, item

    def _response(
        self,
        status: ResponseStatus,
        *,
        output: Sequence[orjson.Fragment] = (),
        usage: Usage | None = None,
        completed_at: int | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        request, params = self._request, self._request.params
        is_cut = status is ResponseStatus.INCOMPLETE
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": completed_at,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": params.max_tokens or None,
            "metadata": request.metadata,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice,
            "tools": [],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage.as_dict(),
            "user": request.user,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        lane = {} if self._stream_id is None else {"stream_id": self._stream_id}
        return orjson.dumps({"type": kind, **lane, **fields, "sequence_number": self._next_number()})

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number


def _encoded(value: object) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps(value))


def error_event(status: int, error: Mapping[str, Any], stream_id: str | None = None) -> bytes:
    """Return the WebSocket's error event; ``error`` holds type, code, message and param."""
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return orjson.dumps({"type": "error", "status": status, **lane, "error": error})
