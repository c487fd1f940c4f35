"""The events of the Responses API as names and JSON, in order and numbered; pure: no socket, no engine, no clock.

    created, [queued,] in_progress,
    [output_item.added, content_part.added, output_text.delta*, output_text.done, content_part.done, output_item.done],
    completed | incomplete | failed

What stands in brackets comes once for each output item, here for a message; reasoning has ``reasoning_text`` events,
calls ``function_call_arguments`` or ``custom_tool_call_input`` and no parts. Only background responses are ``queued``
first. The same builder serves every transport: the framing around the JSON is the transport's (a WebSocket needs no
name beside it, server-sent events do).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from aserve.server.responses.item_ids import ItemPlace
from aserve.server.responses.items import Item
from aserve.server.responses.output_items import Logprobs, OpenCall, OpenItem, OpenMessage, OpenReasoning, encoded
from aserve.server.responses.schema import ResponseRequest
from aserve.server.responses.turns import Call
from aserve.server.sse import escape_line_ends

Event = tuple[str, bytes]  # its type, and its JSON with the type in it


class ResponseStatus(StrEnum):
    """How a response ended, or that it has not."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    CANCELLED = "cancelled"
    FAILED = "failed"


MAX_OUTPUT_TOKENS = "max_output_tokens"  # why a response is incomplete
STEERED = "steered"

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
    num_reasoning_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the ``usage`` object."""
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }


class ResponseEvents:
    """Builds the events of one response; owns its output so far and its sequence number."""

    __slots__ = (
        "_created_at", "_delta_start", "_final", "_lane", "_model", "_open", "_output", "_request",
        "_sequence_number", "_status", "items", "response_id",
    )  # fmt: skip

    def __init__(
        self,
        request: ResponseRequest,
        *,
        response_id: str,
        model: str,
        created_at: int,
        stream_id: str | None = None,
    ) -> None:
        self.response_id = response_id
        self.items: list[Item] = []  # finished ones that a continuation has to know
        self._request = request
        self._model = model
        self._created_at = created_at
        self._lane = {} if stream_id is None else {"stream_id": stream_id}
        self._sequence_number = 0
        self._output: list[orjson.Fragment] = []  # finished items
        self._open: OpenItem | None = None
        self._delta_start = b""
        self._status = ResponseStatus.QUEUED if request.background else ResponseStatus.IN_PROGRESS
        self._final: bytes | None = None  # the response as its terminal event has it

    @property
    def is_queued(self) -> bool:
        """True until ``started``, of a background response."""
        return self._status is ResponseStatus.QUEUED

    @property
    def has_calls(self) -> bool:
        """True once a call has begun."""
        return isinstance(self._open, OpenCall) or any(isinstance(item, Call) for item in self.items)

    @property
    def next_number(self) -> int:
        """The sequence number of the event that comes next."""
        return self._sequence_number

    def opening(self) -> list[Event]:
        """Return the events that say the response was accepted."""
        response = encoded(self._response(self._status))
        return [
            self._event("response.created", response=response),
            self._event(f"response.{self._status}", response=response),
        ]

    def started(self) -> list[Event]:
        """Return the event that says a queued response is being worked at."""
        self._status = ResponseStatus.IN_PROGRESS
        return [self._event("response.in_progress", response=self._response(self._status))]

    def snapshot(self) -> bytes:
        """Return the response object as it is now, with the output items that are finished."""
        return self._final or orjson.dumps(self._response(self._status))

    def delta(self, text: str, logprobs: Logprobs = ()) -> list[Event]:
        """Return the event for new text, after those that open its message if it is the first."""
        events: list[Event] = []
        message = self._open
        if not isinstance(message, OpenMessage):
            message = OpenMessage(*self._next_place("msg", events))
            self._begin(message, events)
        events.append(self._delta_event(message, text, b',"logprobs":', message.add(text, logprobs)))
        return events

    def reasoning(self, text: str) -> list[Event]:
        """Return the event for more of what the model thinks, after those that open the item if it is the first."""
        events: list[Event] = []
        item = self._open
        if not isinstance(item, OpenReasoning):
            is_packed = self._request.wants_packed_reasoning
            item = OpenReasoning(*self._next_place("rs", events), is_packed=is_packed)
            self._begin(item, events)
        item.add(text)
        events.append(self._delta_event(item, text))
        return events

    def begin_call(self, call_id: str, function: str) -> list[Event]:
        """Return the events that open a call of what the model knows as ``function``."""
        events: list[Event] = []
        tool = self._request.tools.name_of(function)
        item_id, index = self._next_place("ctc" if tool.is_custom else "fc", events)
        self._begin(OpenCall(item_id, index, call_id, tool), events)
        return events

    def arguments(self, text: str) -> list[Event]:
        """Return the event for more arguments of the call that is open; none if they show nothing yet."""
        call = self._open
        assert isinstance(call, OpenCall)
        shown = call.add(text)
        return [self._delta_event(call, shown)] if shown else []

    def ending(
        self,
        status: ResponseStatus,
        *,
        usage: Usage | None = None,
        completed_at: int | None = None,
        error: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> list[Event]:
        """Return the events that close the item that is open, if there is one, and the terminal event.

        ``reason`` is why it is incomplete. A completed response has an item even if its text is empty, unless it was a
        warm-up.
        """
        events: list[Event] = []
        is_completed = status is ResponseStatus.COMPLETED
        if is_completed and self._request.generate and self._open is None and not self._output:
            self._begin(OpenMessage(*self._next_place("msg", events)), events)
        is_whole = self._open.is_whole(has_stopped=is_completed) if isinstance(self._open, OpenCall) else is_completed
        self._close_open(events, "completed" if is_whole else "incomplete")
        self._status = status
        response = self._response(status, usage=usage, completed_at=completed_at, error=error, reason=reason)
        self._final = orjson.dumps(response)
        events.append(self._event(TERMINAL_EVENTS[status], response=orjson.Fragment(self._final)))
        return events

    def notice(self, name: str, fields: Mapping[str, Any]) -> Event:
        """Return an event that stands among those of the response without being about its output."""
        return self._event(name, **fields)

    def take_number(self) -> int:
        """Return the next sequence number, for an event that is built elsewhere."""
        self._sequence_number += 1
        return self._sequence_number - 1

    def _next_place(self, prefix: str, events: list[Event]) -> tuple[str, int]:
        """Close what is open; return the id and the index of the item that follows."""
        self._close_open(events, "completed")
        index = len(self._output)
        return ItemPlace(self.response_id, True, index).item_id(prefix), index

    def _begin(self, item: OpenItem, events: list[Event]) -> None:
        self._open = item
        start = orjson.dumps({"type": item.delta_type, **self._lane, **item.place})
        self._delta_start = start[:-1] + b',"delta":'
        announced = item.announced()
        events.append(self._event("response.output_item.added", output_index=len(self._output), item=announced))
        events += [self._event(name, **fields) for name, fields in item.opening()]

    def _delta_event(self, item: OpenItem, text: str, *further: bytes) -> Event:
        number = self._sequence_number
        self._sequence_number = number + 1
        tail = b',"sequence_number":%d}' % number
        return item.delta_type, b"".join((self._delta_start, orjson.dumps(text), *further, tail))

    def _close_open(self, events: list[Event], status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, OpenCall) and status == "completed" and (rest := item.rest()):
            events.append(self._delta_event(item, rest))
        closed = item.close(status)
        events += [self._event(name, **fields) for name, fields in closed.events]
        if closed.is_done:
            events.append(self._event("response.output_item.done", output_index=len(self._output), item=closed.item))
        self._output.append(closed.item)
        if closed.kept is not None:
            self.items.append(closed.kept)

    def _response(
        self,
        status: ResponseStatus,
        *,
        usage: Usage | None = None,
        completed_at: int | None = None,
        error: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        request, params = self._request, self._request.params
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": completed_at,
            "status": status,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "background": request.background,
            "instructions": request.instructions,
            "max_output_tokens": params.max_tokens or None,
            "metadata": request.metadata,
            "model": self._model,
            "output": self._output,
            "parallel_tool_calls": request.tools.options.is_parallel,
            "previous_response_id": request.previous_response_id,
            "reasoning": request.reasoning,
            "store": request.is_kept,
            "temperature": params.temperature,
            "text": orjson.Fragment(request.shown_text),
            "tool_choice": orjson.Fragment(request.tools.shown_choice),
            "tools": orjson.Fragment(request.tools.shown),
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage.as_dict(),
            "user": request.user,
        }

    def _event(self, name: str, /, **fields: Any) -> Event:
        number = self._sequence_number
        self._sequence_number = number + 1
        return name, orjson.dumps({"type": name, **self._lane, **fields, "sequence_number": number})


def error_event(status: int, error: Mapping[str, Any], stream_id: str | None = None) -> bytes:
    """Return the WebSocket's error event; ``error`` holds type, code, message and param."""
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return orjson.dumps({"type": "error", "status": status, **lane, "error": error})


def sse_frame(event: Event) -> bytes:
    """Return ``event`` as a server-sent event."""
    name, payload = event
    data = payload if payload.isascii() else escape_line_ends(payload)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def payload_of(frame: bytes) -> bytes:
    """Return the JSON in what ``sse_frame`` made."""
    return frame[frame.index(b"\ndata: ") + 7 : -2]
