"""The engine requests behind one HTTP answer: added all or none, ended together, aborted when the client leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.types import Scope, Send

from aserve.engine.sink import Sink
from aserve.errors import AserveError
from aserve.parsing.answer_reader import AnswerReader
from aserve.request import Request
from aserve.server.collect_sink import CollectSink
from aserve.server.json_body import ClientGoneError
from aserve.server.sse import DONE, HEADERS, KEEP_ALIVE
from aserve.server.state import ServerState
from aserve.server.stream_sink import FrameBuilder, Outlet, StreamSink
from aserve.server.transport import EXTENSION, FrameTransport

AnySink = TypeVar("AnySink", bound=Sink)


@dataclass(frozen=True, slots=True)
class StreamForm:
    """What a protocol's streams say besides the frames of their requests."""

    opening: bytes = b""
    keep_alive: bytes = KEEP_ALIVE
    ending: bytes = DONE


OPENAI_FORM = StreamForm()


class Generation:
    """Runs the requests of one answer on one transport; ``ended`` completes when none is left."""

    def __init__(self, state: ServerState, transport: FrameTransport) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state = state
        self._transport = transport
        self._running: dict[str, Sink] = {}

    def start(
        self, requests: Sequence[Request], make_sink: Callable[[int, Callable[[], None]], AnySink]
    ) -> list[AnySink]:
        """Give ``requests`` to the engine; ``make_sink`` gets the place of each and what to call at its end.

        If the engine refuses one, the others are aborted and its error is raised.
        """
        if self._transport.is_closed:
            raise ClientGoneError
        sinks = []
        try:
            for choice, request in enumerate(requests):
                sink = make_sink(choice, partial(self._finish, request.request_id))
                self._state.engine.add(request, sink)
                self._running[request.request_id] = sink
                sinks.append(sink)
        except BaseException:
            self.abort()
            raise
        self._state.register(self)
        self._transport.on_close(self.abort)
        return sinks

    def abort(self) -> None:
        """End every request that still runs. Idempotent."""
        running, self._running = self._running, {}
        for request_id in running:
            self._state.engine.abort(request_id)
        self._end()

    def begin_drain(self) -> None:
        """Let the requests finish."""

    def shut_down(self, error: AserveError) -> None:
        """End every request with ``error``; a client that does not read is cut off."""
        for request_id, sink in tuple(self._running.items()):
            sink.fail(error)
            self._state.engine.abort(request_id)
        if self._running:
            self._transport.abort()

    def _finish(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        if not self._running:
            self._end()

    def _end(self) -> None:
        self._state.unregister(self)
        if not self.ended.done():
            self.ended.set_result(None)


def transport_of(scope: Scope) -> FrameTransport:
    """Return the connection that belongs to ``scope``."""
    transport: FrameTransport = scope["extensions"][EXTENSION]
    return transport


async def collect(
    state: ServerState, scope: Scope, requests: Sequence[Request], readers: Sequence[AnswerReader | None] = ()
) -> list[CollectSink]:
    """Return the finished sinks of ``requests``, in order, each with its own of ``readers`` if there are any.

    Raises the error of the first one that failed, ClientGoneError if the client leaves.
    """
    transport = transport_of(scope)
    generation = Generation(state, transport)
    try:
        sinks = generation.start(
            requests, lambda choice, on_end: CollectSink(on_end, readers[choice] if readers else None)
        )
        await generation.ended
    finally:
        generation.abort()
    if transport.is_closed:
        raise ClientGoneError
    for sink in sinks:
        if sink.error is not None:
            raise sink.error
    return sinks


async def stream(
    state: ServerState,
    scope: Scope,
    send: Send,
    requests: Sequence[Request],
    builders: Sequence[FrameBuilder],
    closing_frame: Callable[[], bytes] = bytes,
    sink_type: type[StreamSink] = StreamSink,
    form: StreamForm = OPENAI_FORM,
) -> None:
    """Answer with server-sent events, one builder per request; ``closing_frame`` comes before the form's ending.

    Raises what the engine says to the requests before anything is sent. Frames go from the sinks straight to the
    transport; this task only waits for the end.
    """
    transport = transport_of(scope)
    outlet = Outlet(transport, form.keep_alive)
    generation = Generation(state, transport)
    sinks = generation.start(requests, lambda choice, on_end: sink_type(outlet, builders[choice], on_end))
    try:
        async with streamed_answer(state, outlet, send):
            if form.opening:
                outlet.write(form.opening)
            outlet.open()
            await generation.ended
            has_failed = any(sink.has_failed for sink in sinks)
            if ending := form.ending if has_failed else closing_frame() + form.ending:
                outlet.write(ending)
    finally:
        generation.abort()


@asynccontextmanager
async def streamed_answer(state: ServerState, outlet: Outlet, send: Send) -> AsyncIterator[None]:
    """Send the head of a streamed answer, and behind what is written meanwhile its end, unless something is raised.

    Writing begins with ``outlet.open``; the heartbeat looks after ``outlet`` until it is closed at the end.
    """
    try:
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        state.heartbeat.add(outlet)
        yield
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        state.heartbeat.remove(outlet)
        outlet.close()


async def send_json(send: Send, body: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Answer with ``body``, which is JSON."""
    length = (b"content-length", b"%d" % len(body))
    start: dict[str, Any] = {"type": "http.response.start", "status": status}
    await send({**start, "headers": [(b"content-type", b"application/json"), length, *headers]})
    await send({"type": "http.response.body", "body": body})
