"""One response, from prompt to terminal event, on whatever transport; builds the frames for its sink."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aserve.engine.async_engine import AsyncEngine
from aserve.errors import AserveError, CapacityError, ClientError
from aserve.request import FinishReason, Request, RequestOutput, SamplingParams
from aserve.server.answer_events import AnswerEvents
from aserve.server.answer_style import AnswerStyle
from aserve.server.errors import blaming
from aserve.server.logprobs import TokenNames
from aserve.server.responses.events import (
    MAX_OUTPUT_TOKENS,
    STEERED,
    Event,
    ResponseEvents,
    ResponseStatus,
    Usage,
    sse_frame,
)
from aserve.server.responses.items import Item, MessageItem
from aserve.server.responses.kept import KeptResponse
from aserve.server.responses.schema import TEXT_FORMAT, ResponseRequest
from aserve.server.responses.turns import chat_messages
from aserve.server.stream_sink import Outlet, StreamSink
from aserve.server.structured_request import prepare_grammar
from aserve.tokenizer.spans import Span, join_spans

Framing = Callable[[Sequence[Event]], list[bytes]]


@dataclass(frozen=True, slots=True)
class LastTurn:
    """What the next turn needs of a response that has ended; ``settings`` are its request without its items."""

    kept: KeptResponse
    settings: ResponseRequest


class ResponseRun:
    """Runs one response: ``prepare``, ``open``, ``wait``.

    ``frame`` puts events into the form of the transport. ``on_end`` is called when the response has ended, before its
    last frames are written; ``on_written`` after them.
    """

    __slots__ = (
        "_answer", "_broken_off", "_engine", "_frame", "_history", "_is_plain", "_is_queued", "_is_steered",
        "_is_stopping", "_is_submitted", "_kept", "_last", "_lease", "_on_end", "_on_written", "_outlet",
        "_output_ids", "_params", "_prompt", "_prompt_ids", "_sink", "_style", "_texts", "_written", "error",
        "events", "is_cancelled", "request", "status",
    )  # fmt: skip

    def __init__(
        self,
        request: ResponseRequest,
        events: ResponseEvents,
        engine: AsyncEngine,
        style: AnswerStyle,
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
        self._style = style
        self._outlet = outlet
        self._frame = frame
        self._on_end = on_end
        self._on_written = on_written
        self._lease = lease
        self._sink: StreamSink | None = StreamSink(outlet, self, self._note_end)
        self._written = asyncio.Event()
        self._history: list[Item] = []
        self._prompt: list[Span] = []
        self._prompt_ids: tuple[int, ...] = ()  # of its spans
        self._params: SamplingParams = request.engine_params
        self._answer: AnswerEvents | None = None  # when it is known how to read it
        self._is_plain = False  # nearly every output is one event, of new text
        self._output_ids: list[int] = []
        self._texts: list[str] = []
        self._last: RequestOutput | None = None  # the first at least, for the usage
        self._kept: KeptResponse | None = None  # once somebody has asked for it
        self._is_submitted = False
        self._broken_off: AserveError | None = None
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

    def kept(self) -> KeptResponse:
        """Return what a continuation needs, once it has ended; made at the first call."""
        if self._kept is None:
            self._kept = self._make_kept()
        return self._kept

    def last_turn(self) -> LastTurn | None:
        """Return what can be continued; None before its end, and if it has failed."""
        if self.status in (ResponseStatus.IN_PROGRESS, ResponseStatus.FAILED):
            return None
        return LastTurn(self.kept(), replace(self.request, items=[]))

    async def prepare(self, previous: KeptResponse | None) -> None:
        """Encode the conversation and queue it; raises what is known before the first event."""
        num_items = -1
        while num_items != len(self.request.items):  # what steers it may come in during the encoding
            num_items = len(self.request.items)
            await self.encode(previous)
        if self._broken_off is not None:
            raise self._broken_off
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
                tools=self.request.tools.options.for_template(),
                template_kwargs=self.request.template_kwargs,
            )
        await self._plan()
        return len(self._prompt_ids)

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
        """End as steered, with what has been generated so far, unless it ends otherwise before. Idempotent.

        One that has begun to call tools goes on: its client acts on the calls, and what they return is wanted next.
        """
        if self.events.has_calls:
            return
        self._is_steered = self._is_stopping = True  # the last frames may be made by the next line
        self._is_steered = self._engine.abort(self.response_id)

    def tell(self, name: str, fields: Mapping[str, Any]) -> None:
        """Write an event that is not about the output, before the last one."""
        self._write(self._frame([self.events.notice(name, fields)]))

    def end(self, error: AserveError) -> None:
        """End as failed now."""
        self._broken_off = error
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
        is_usual = self._is_plain and self._last is not None and not self._is_stopping
        if is_usual and text and output.finish_reason is None:
            return self._frame(self.events.delta(text))  # nearly every token; keeps nothing of the output alive
        started: list[Event] = []
        if self._is_queued:
            self._is_queued = False
            started = self.events.started()
        return self._frame(started) + self._rare_frames(output)

    def failure_frames(self, error: AserveError) -> list[bytes]:
        """Return the frames that end the response before its last token, for ``error`` or at the client's wish."""
        held = [] if self._answer is None else self._frame(self._answer.end())
        if self.is_cancelled:
            return held + self._ending(ResponseStatus.CANCELLED)
        if self._is_steered:
            return held + self._ending(ResponseStatus.INCOMPLETE, reason=STEERED)
        self.error = error
        return held + self._ending(ResponseStatus.FAILED, failure_body(error))

    def _make_kept(self) -> KeptResponse:
        written = self._engine.tokenizer.written_span("".join(self._texts), self._output_ids)
        items = [*self._history, *self.request.items, *self.events.items]
        return KeptResponse(self.response_id, items, [*self._prompt, written] if self._output_ids else self._prompt)

    async def _plan(self) -> None:
        """Find out how the prompt is to be answered, and how the answer is to be read."""
        self._prompt_ids = tuple(join_spans(self._prompt))
        plan = self._style.plan(self.request.tools.options, self.request.engine_params, self._prompt_ids)
        await prepare_grammar(self._engine, plan.params, {})  # what is wrong now is wrong with the tools
        reader = plan.reader()
        names = TokenNames(self._engine.tokenizer, hides_special=plan.params.skip_special_tokens)
        self._params = plan.params
        self._answer = AnswerEvents(self.events, reader, names)
        self._is_plain = reader is None and plan.params.logprobs is None

    def _rare_frames(self, output: RequestOutput) -> list[bytes]:
        assert self._answer is not None  # it was submitted
        self._last = output
        frames = self._frame(self._answer.read(output))
        if output.finish_reason is not None:
            is_cut = output.finish_reason is FinishReason.LENGTH and self.request.generate
            status = ResponseStatus.INCOMPLETE if is_cut else ResponseStatus.COMPLETED
            frames += self._ending(status, reason=MAX_OUTPUT_TOKENS if is_cut else None)
        return frames

    def _submit(self) -> None:
        request = Request(
            request_id=self.response_id,
            prompt_token_ids=self._prompt_ids,
            params=self._params,
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
            return Usage(len(self._prompt_ids), 0, 0)
        num_reasoning = 0 if self._answer is None else self._answer.num_reasoning_tokens
        last = self._last  # of a failure, it may be the first
        return Usage(last.num_prompt_tokens, last.num_cached_tokens, len(self._output_ids), num_reasoning)

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
