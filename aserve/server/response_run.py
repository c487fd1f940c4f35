"""One response on a WebSocket, from prompt to terminal event; builds the frames for its sink."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aserve.engine.async_engine import AsyncEngine
from aserve.errors import AserveError, CapacityError, ClientError
from aserve.request import FinishReason, Request, RequestOutput, TokenLogprobs
from aserve.server.errors import blaming
from aserve.server.logprobs import TokenNames, finite
from aserve.server.response_events import Event, ResponseEvents, ResponseStatus, Usage
from aserve.server.response_items import Item, chat_messages
from aserve.server.response_schema import ResponseRequest
from aserve.server.stream_sink import Outlet, StreamSink


class ResponseRun:
    """Runs one response. ``execute`` returns its status once the last frame has been written."""

    __slots__ = (
        "_engine", "_held_logprobs", "_is_cancelled", "_is_submitted", "_last", "_names", "_num_prompt_tokens",
        "_outlet", "_request", "_sink", "_status", "_written", "events",
    )  # fmt: skip

    def __init__(self, request: ResponseRequest, events: ResponseEvents, engine: AsyncEngine, outlet: Outlet) -> None:
        self.events = events
        self._request = request
        self._engine = engine
        self._outlet = outlet
        self._names = TokenNames(engine.tokenizer, hides_special=request.params.skip_special_tokens)
        self._sink: StreamSink | None = StreamSink(outlet, self, self._note_end)
        self._written = asyncio.Event()
        self._status = ResponseStatus.IN_PROGRESS
        self._num_prompt_tokens = 0
        self._last: RequestOutput | None = None  # for the usage
        self._held_logprobs: list[Mapping[str, Any]] = []  # of tokens whose text is still held back
        self._is_submitted = False
        self._is_cancelled = False

    @property
    def response_id(self) -> str:
        """Also the engine's request id."""
        return self.events.response_id

    async def execute(self, items: list[Item]) -> ResponseStatus:
        """Answer ``items``; raise what is known before the first event, after which nothing was written."""
        with blaming("input"):
            prompt_ids = await self._engine.encode(chat_messages(items), template_kwargs=self._request.template_kwargs)
        self._num_prompt_tokens = len(prompt_ids)
        if not self._is_cancelled:
            self._submit(prompt_ids)
        self._write(framed(self.events.opening()))
        if not self._is_submitted:
            self._write(self._ending(ResponseStatus.CANCELLED))
        else:
            await self._written.wait()
        return self._status

    def cancel(self) -> None:
        """End as cancelled, with what has been generated so far. Idempotent."""
        self._is_cancelled = True
        if self._is_submitted:
            self._engine.abort(self.response_id)

    def end(self, error: AserveError) -> None:
        """End as failed now."""
        if self._sink is not None:
            self._sink.fail(error)
        self._engine.abort(self.response_id)

    def close(self) -> None:
        """Make sure that the engine does not work for this response any more. Idempotent."""
        if self._is_submitted and not self._written.is_set():
            self._engine.abort(self.response_id)
        self._sink = None  # it refers back to this run, and the garbage collector is off while the server is busy

    def frames(self, output: RequestOutput) -> list[bytes]:
        """Return the frames for what is new, and those that end the response if it is the last output."""
        reason = output.finish_reason
        if reason is None and output.text and not output.logprobs and not self._held_logprobs:
            if self._is_cancelled:
                self._last = output
            return framed(self.events.delta(output.text))  # nearly every token; keeps nothing of the output alive
        self._last = output
        if output.logprobs:
            self._held_logprobs += render_logprobs(self._names, output.logprobs)
        frames: list[bytes] = []
        if output.text or (reason is not None and self._held_logprobs):
            frames = framed(self.events.delta(output.text, self._held_logprobs))
            self._held_logprobs = []
        if reason is not None:
            frames += self._ending(self._status_of(reason))
        return frames

    def failure_frames(self, error: AserveError) -> list[bytes]:
        """Return the frames that end the response before its last token, for ``error`` or at the client's wish."""
        if self._is_cancelled:
            return self._ending(ResponseStatus.CANCELLED)
        return self._ending(ResponseStatus.FAILED, failure_body(error))

    def _submit(self, prompt_ids: list[int]) -> None:
        request = Request(
            request_id=self.response_id,
            prompt_token_ids=tuple(prompt_ids),
            params=self._request.params,
            priority=self._request.priority,
            arrival_time_s=time.monotonic(),
        )
        assert self._sink is not None
        self._engine.add(request, self._sink)
        self._is_submitted = True

    def _status_of(self, reason: FinishReason) -> ResponseStatus:
        if reason is FinishReason.LENGTH and self._request.generate:
            return ResponseStatus.INCOMPLETE
        return ResponseStatus.COMPLETED

    def _ending(self, status: ResponseStatus, error: Mapping[str, Any] | None = None) -> list[bytes]:
        self._status = status
        is_completed = status is ResponseStatus.COMPLETED
        completed_at = int(time.time()) if is_completed else None
        return framed(self.events.ending(status, usage=self._usage(), completed_at=completed_at, error=error))

    def _usage(self) -> Usage:
        if self._last is None:
            return Usage(self._num_prompt_tokens, 0, 0)
        return Usage(self._last.num_prompt_tokens, self._last.num_cached_tokens, self._last.num_output_tokens)

    def _write(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self._outlet.write(frame)

    def _note_end(self) -> None:
        self._written.set()


def framed(events: Sequence[Event]) -> list[bytes]:
    """Return the frames of ``events`` on a WebSocket: their JSON as it is."""
    return [payload for _, payload in events]


def failure_body(error: AserveError) -> dict[str, str]:
    """Return the ``error`` of a failed response; the protocol allows a closed set of codes."""
    code = "server_error"
    if isinstance(error, CapacityError):
        code = "rate_limit_exceeded"
    elif isinstance(error, ClientError):
        code = "invalid_prompt"
    return {"code": code, "message": str(error)}


def render_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Return the JSON form of ``entries``, one for each token."""
    return [
        {
            **_render_token(names, entry.token_id, entry.logprob),
            "top_logprobs": [_render_token(names, token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]


def _render_token(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    shown = names.visible_bytes(token_id) or b""
    return {"token": names.name(token_id), "bytes": list(shown), "logprob": finite(logprob)}
