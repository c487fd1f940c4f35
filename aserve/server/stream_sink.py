"""From commit to the socket in one call: sinks that turn outputs into frames without a task or a queue.

A connection whose peer reads too slowly costs bounded memory: what is new for a request is merged into one output
until the peer catches up, and a peer that stalls is cut off.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from aserve.errors import AserveError, EngineDeadError
from aserve.request import FinishReason, RequestOutput
from aserve.server.transport import FrameTransport

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 4 << 20  # merged, over all requests of a connection
FAILURES = (FinishReason.ABORT, FinishReason.ERROR)


class FrameBuilder(Protocol):
    """Turns the outputs of one request into frames; holds the constant bytes of its stream."""

    def frames(self, output: RequestOutput) -> Sequence[bytes]:
        """Return the frames that show ``output``; none if there is nothing to show yet."""

    def failure_frames(self, error: AserveError) -> Sequence[bytes]:
        """Return the frames that end the stream after ``error``."""


class Flushable(Protocol):
    """Something that has frames for a peer that was not ready for them."""

    def flush(self) -> None:
        """Write what waits."""


class Outlet:
    """The way out for one response: a transport, the sinks that wait for it, and its silence in beats.

    Nothing is written before ``open``, so that sinks may be filled while the response head is still on its way.
    """

    def __init__(self, transport: FrameTransport, keep_alive: bytes | None = None) -> None:
        self._transport = transport
        self._keep_alive = keep_alive
        self._is_open = False
        self._waiting: list[Flushable] = []
        self._held_bytes = 0  # that waiting sinks have merged
        self._silent_beats = 0
        self._stalled_beats = 0

    @property
    def is_writable(self) -> bool:
        """True while frames may be written at once."""
        return self._is_open and self._transport.is_writable

    def open(self) -> None:
        """Write what has come in so far, and from now on at once."""
        self._is_open = True
        self._transport.on_writable(self._flush)
        self._flush()

    def close(self) -> None:
        """Write nothing more."""
        self._is_open = False
        self._waiting.clear()
        self._transport.on_writable(None)

    def write(self, frame: bytes) -> None:
        """Send ``frame`` now, writable or not."""
        self._silent_beats = 0
        self._transport.write_frame(frame)

    def wait(self, sink: Flushable) -> None:
        """Flush ``sink`` when the peer has caught up."""
        self._waiting.append(sink)

    def hold(self, num_bytes: int) -> None:
        """Learn that a waiting sink has merged that much; cut off a peer that much waits for."""
        self._held_bytes += num_bytes
        if self._held_bytes > MAX_PENDING_BYTES:
            self.cut_off(f"{self._held_bytes} bytes wait for it")

    def release(self, num_bytes: int) -> None:
        """Learn that what a sink held is no longer held."""
        self._held_bytes -= num_bytes

    def cut_off(self, reason: str) -> None:
        """Cut the connection of a peer that does not read."""
        logger.warning("cutting off a client: %s", reason)
        self._transport.abort()

    def beat(self, keep_alive_beats: int, stall_beats: int) -> None:
        """Send a keep-alive frame after silence; cut off a peer that has stalled."""
        if not self._is_open:
            return
        if not self._transport.is_writable:
            self._stalled_beats += 1
            if self._stalled_beats >= stall_beats and not self._transport.is_closed:
                self.cut_off("it has stopped reading its stream")
            return
        self._stalled_beats = 0
        self._silent_beats += 1
        if self._keep_alive is not None and 0 < keep_alive_beats <= self._silent_beats:
            self.write(self._keep_alive)

    def _flush(self) -> None:
        self._stalled_beats = 0
        waiting, self._waiting = self._waiting, []
        for position, sink in enumerate(waiting):
            if not self.is_writable:
                self._waiting = waiting[position:] + self._waiting
                return
            sink.flush()


class StreamSink:
    """The engine's sink of one streamed request. ``on_end`` is called once, after the last frame was written."""

    __slots__ = ("_builder", "_error", "_is_over", "_merged_bytes", "_on_end", "_outlet", "_pending", "has_failed")

    def __init__(self, outlet: Outlet, builder: FrameBuilder, on_end: Callable[[], None]) -> None:
        self.has_failed = False  # its last frame told an error
        self._outlet = outlet
        self._builder = builder
        self._on_end = on_end
        self._is_over = False  # the engine has nothing more to say; what waits is still to be written
        self._pending: RequestOutput | None = None
        self._merged_bytes = 0  # in ``_pending``, besides its first output
        self._error: AserveError | None = None

    def put(self, output: RequestOutput) -> None:
        """Write ``output`` at once while the peer keeps up, else merge it with what waits."""
        reason = output.finish_reason
        if self._is_over:  # aborted after ``fail``
            return
        if reason is not None and reason in FAILURES:
            output.finish_reason = None  # its text is good; its end is a failure
            self.put(output)
            self.fail(EngineDeadError("the request was ended by the server"))
            return
        outlet = self._outlet
        if self._pending is None and outlet.is_writable:
            for frame in self._builder.frames(output):
                outlet.write(frame)
            if reason is not None:
                self._is_over = True
                self._on_end()
        else:
            self._is_over = reason is not None
            self._keep(output)

    def fail(self, error: AserveError) -> None:
        """End the stream with an error frame."""
        if self._is_over:
            return
        self._is_over = True
        self._error = error
        if self._pending is not None:
            return
        if self._outlet.is_writable:
            self.flush()
        else:
            self._outlet.wait(self)

    def flush(self) -> None:
        """Write what waits."""
        pending, self._pending = self._pending, None
        self._outlet.release(self._merged_bytes)
        self._merged_bytes = 0
        frames = [] if pending is None else [*self._builder.frames(pending)]
        if self._error is not None:
            self.has_failed = True
            frames += self._builder.failure_frames(self._error)
        for frame in frames:
            self._outlet.write(frame)
        if self._is_over:
            self._on_end()

    def _keep(self, output: RequestOutput) -> None:
        if self._pending is None:
            self._pending = output
            self._outlet.wait(self)
            return
        self._pending.merge(output)
        num_bytes = size_of(output)
        self._merged_bytes += num_bytes
        self._outlet.hold(num_bytes)


def size_of(output: RequestOutput) -> int:
    """Return roughly the bytes that ``output`` adds to a merged one."""
    size = len(output.text) * 2 + len(output.token_ids) * 16
    for entries in (output.logprobs, output.prompt_logprobs):
        size += sum(64 + 64 * len(entry.top) for entry in entries or () if entry is not None)
    return size
