"""One response, from prompt to terminal event, on whatever transport; builds the frames for its sink."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aserve.engine.async_engine import AsyncEngine
from aserve.errors import AserveError, CapacityError, ClientError
from aserve.request import FinishReason, Request, RequestOutput, TokenLogprobs
from aserve.server.errors import blaming
from aserve.server.logprobs import TokenNames, finite
from aserve.server.response_archive import KeptResponse
from aserve.server.response_events import (
    MAX_OUTPUT_TOKENS,
    STEERED,
    Event,
    ResponseEvents,
    ResponseStatus,
    Usage,
    sse_frame,
)
from aserve.server.response_items import Item, MessageItem
from aserve.server.response_schema import TEXT_FORMAT, ResponseRequest
from aserve.server.response_turns import chat_messages
from aserve.server.stream_sink import Outlet, StreamSink
from aserve.server.structured_request import prepare_grammar
from aserve.tokenizer.spans import Span, join_spans

Framing = Callable[[Sequence[Event]], list[bytes]]


class ResponseRun:
    """Runs one response: ``prepare``, ``open``, ``wait``.

    ``frame`` puts events into the form of the transport. ``on_end`` is called when the response has ended, before its
    last frames are written; ``on_written`` after them.
    """

    __slots__ = (
        "_engine", "_frame", "_held_logprobs", "_history", "_is_queued", "_is_steered", "_is_stopping",
        "_is_submitted", "_last", "_lease", "_names", "_on_end", "_on_written", "_outlet", "_output_ids", "_prompt",
        "_sink", "_texts", "_written", "error", "events", "is_cancelled", "request", "status",
    )  # fmt: skip

    def __init__(
        self,
        request: ResponseRequest,
        events: ResponseEvents,
        engine: AsyncEngine,
        outlet: Outlet,
        *,
        frame: Framing,
        on_end: Callable[["ResponseRun"], None],
        on_written: Callable[[], None] = lambda: None,
        lease: str | None = None,
    ) -> None:
        self.events = events
        self._is_queued = events.is_queued  # its first output must say that it has started
        self.status = ResponseStatus.IN_PROGRESS
        self.error: AserveError | None = None  # why it failed
        self.request = request
        self._engine = engine
        self._outlet = outlet
        self._frame = frame
        self._on_end = on_end
        self._on_written = on_written
        self._lease = lease
        self._names = TokenNames(engine.tokenizer, hides_special=request.params.skip_special_tokens)
        self._sink: StreamSink | None = StreamSink(outlet, self, self._note_end)
        self._written = asyncio.Event()
        self._history: list[Item] = []
        self._prompt: list[Span] = []
        self._output_ids: list[int] = []
        self._texts: list[str] = []
        self._last: RequestOutput | None = None  # for the usage
        self._held_logprobs: list[Mapping[str, Any]] = []  # of tokens whose text is still held back
        self._is_submitted = False
        self._is_steered = False
        self._is_stopping = False
        self.is_cancelled = False  # its client wants nothing more of it

    @property
    def response_id(self) -> str:
        """Also the engine's request id."""
        return self.events.response_id

    @property
    def new_items(self) -> list[Item]:
        """What it answers, without the conversation before."""
        return self.request.items

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(span.token_ids) for span in self._prompt)

    def kept(self) -> KeptResponse:
        """Return what a continuation needs, once it has ended."""
        written = self._engine.tokenizer.written_span("".join(self._texts), self._output_ids)
        items = [*self._history, *self.request.items, *self.events.items]
        return KeptResponse(self.response_id, items, [*self._prompt, written] if self._output_ids else self._prompt)

    async def prepare(self, previous: KeptResponse | None) -> None:
        """Encode the conversation and queue it; raises what is known before the first event."""
        num_items = -1
        while num_items != len(self.request.items):  # what steers it may come in during the encoding
            num_items = len(self.request.items)
            await self.encode(previous)
        if not self.is_cancelled:
            self._submit()

    async def encode(self, previous: KeptResponse | None) -> int:
        """Encode the conversation, and return the number of its tokens."""
        if previous is not None:
            self._history = previous.items
        items = [*self._history, *self.request.items]
        if self.request.instructions is not None:
            items.insert(0, MessageItem("system", self.request.instructions))
        await prepare_grammar(self._engine, self.request.params, self.request.formats, TEXT_FORMAT)
        with blaming("input"):
            self._prompt = await self._engine.prompts.encode_turn(
                chat_messages(items),
                previous.spans if previous is not None else (),
                template_kwargs=self.request.template_kwargs,
            )
        return self._num_prompt_tokens

    def open(self) -> None:
        """Write the events that say it was accepted; those that follow write themselves."""
        self._write(self._frame(self.events.opening()))
        if not self._is_submitted:
            self._write(self._ending(ResponseStatus.CANCELLED))
            self._note_end()

    async def wait(self) -> ResponseStatus:
        """Return how it ended, once the last frame has been written."""
        await self._written.wait()
        return self.status

    def cancel(self) -> None:
        """End as cancelled, with what has been generated so far. Idempotent."""
        self.is_cancelled = self._is_stopping = True
        if self._is_submitted:
            self._engine.abort(self.response_id)

    def steer(self) -> None:
        """End as steered, with what has been generated so far, unless it ends otherwise before. Idempotent."""
        self._is_steered = self._is_stopping = True  # the last frames may be made by the next line
        self._is_steered = self._engine.abort(self.response_id)

    def tell(self, name: str, fields: Mapping[str, Any]) -> None:
        """Write an event that is not about the output, before the last one."""
        self._write(self._frame([self.events.notice(name, fields)]))

    def end(self, error: AserveError) -> None:
        """End as failed now."""
        if self._sink is not None:
            self._sink.fail(error)
        self._engine.abort(self.response_id)

    def close(self) -> None:
        """Make sure that the engine does not work for this response any more, and that nobody waits. Idempotent."""
        self.is_cancelled = True
        if self._is_submitted and not self._written.is_set():
            self._engine.abort(self.response_id)
        self._written.set()
        self._sink = None  # it refers back to this run, and the garbage collector is off while the server is busy

    def frames(self, output: RequestOutput) -> list[bytes]:
        """Return the frames for what is new, and those that end the response if it is the last output."""
        text = output.text
        self._output_ids += output.token_ids
        self._texts.append(text)
        if (
            text
            and output.finish_reason is None
            and not (output.logprobs or self._held_logprobs or self._is_queued or self._is_stopping)
        ):
            return self._frame(self.events.delta(text))  # nearly every token; keeps nothing of the output alive
        if self._is_queued:
            self._is_queued = False
            return self._frame(self.events.started()) + self._rare_frames(output)
        return self._rare_frames(output)

    def failure_frames(self, error: AserveError) -> list[bytes]:
        """Return the frames that end the response before its last token, for ``error`` or at the client's wish."""
        if self.is_cancelled:
            return self._ending(ResponseStatus.CANCELLED)
        if self._is_steered:
            return self._ending(ResponseStatus.INCOMPLETE, reason=STEERED)
        self.error = error
        return self._ending(ResponseStatus.FAILED, failure_body(error))

    def _rare_frames(self, output: RequestOutput) -> list[bytes]:
        reason = output.finish_reason
        self._last = output
        if output.logprobs:
            self._held_logprobs += render_logprobs(self._names, output.logprobs)
        frames: list[bytes] = []
        if output.text or (reason is not None and self._held_logprobs):
            frames = self._frame(self.events.delta(output.text, self._held_logprobs))
            self._held_logprobs = []
        if reason is not None:
            is_cut = reason is FinishReason.LENGTH and self.request.generate
            status = ResponseStatus.INCOMPLETE if is_cut else ResponseStatus.COMPLETED
            frames += self._ending(status, reason=MAX_OUTPUT_TOKENS if is_cut else None)
        return frames

    def _submit(self) -> None:
        request = Request(
            request_id=self.response_id,
            prompt_token_ids=tuple(join_spans(self._prompt)),
            params=self.request.params,
            priority=self.request.priority,
            arrival_time_s=time.monotonic(),
            lease=self._lease,
        )
        assert self._sink is not None
        self._engine.add(request, self._sink)
        self._is_submitted = True

    def _ending(
        self, status: ResponseStatus, error: Mapping[str, Any] | None = None, reason: str | None = None
    ) -> list[bytes]:
        self.status = status
        is_completed = status is ResponseStatus.COMPLETED
        completed_at = int(time.time()) if is_completed else None
        events = self.events.ending(status, usage=self._usage(), completed_at=completed_at, error=error, reason=reason)
        self._on_end(self)
        return self._frame(events)

    def _usage(self) -> Usage:
        if self._last is None:
            return Usage(self._num_prompt_tokens, 0, 0)
        return Usage(self._last.num_prompt_tokens, self._last.num_cached_tokens, self._last.num_output_tokens)

    def _write(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self._outlet.write(frame)

    def _note_end(self) -> None:
        self._written.set()
        self._on_written()


def socket_frames(events: Sequence[Event]) -> list[bytes]:
    """Return the frames of ``events`` on a WebSocket: their JSON as it is."""
    return [payload for _, payload in events]


def sse_frames(events: Sequence[Event]) -> list[bytes]:
    """Return the frames of ``events`` in a stream of server-sent events."""
    return [sse_frame(event) for event in events]


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
