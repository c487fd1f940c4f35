"""uvicorn's HTTP protocol with a direct way for streamed bodies: one ``transport.write`` per frame.

Each request finds its ``FrameTransport`` in ``scope["extensions"][EXTENSION]``. It may write once the
response head has been sent with chunked encoding, and not after the response was completed.
"""

import asyncio
import re
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from aserve.server.transport import EXTENSION

# What the kernel may hold beyond what the peer's window takes: without it, a peer that does not read is
# noticed only after megabytes.
NOT_SENT_BYTES = 64 * 1024

# A client that sends a body too large to be taken reads the answer after it has sent all of it.
MAX_DISCARDED_BYTES = 64 * 2**20

MAX_HEAD_BYTES = 256 * 1024
HEAD_TIMEOUT_S = 30.0


H2C_OFFER = re.compile(rb"^upgrade(?=:[ \t]*h2c[ \t]*\r?$)", re.IGNORECASE | re.MULTILINE)


def without_h2c_offer(data: bytes) -> bytes:
    """Mask an offer of HTTP/2 in a request head, which some clients always make.

    A server may ignore it (RFC 9110, 7.8), but the parser would take what follows the head for the other protocol.
    """
    if b"h2c" not in data:
        return data
    head, end, rest = data.partition(b"\r\n\r\n")
    return H2C_OFFER.sub(b"ignored", head) + end + rest


class BodyTransport:
    """The body of one response, as a ``FrameTransport``.

    The scope leads to it, so it does not lead back to the scope: the garbage collector is off while steps run.
    """

    def __init__(self, protocol: "HttpProtocol", cycle: RequestResponseCycle) -> None:
        self.is_closed = False
        self.is_writable = not cycle.flow.write_paused  # while the peer keeps up and is there
        self._protocol = protocol
        self._is_chunked = True
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._write = cycle.transport.write
        self._writable_callback: Callable[[], None] | None = None
        self._close_callbacks: list[Callable[[], None]] = []

    def write_frame(self, payload: bytes) -> None:
        """Send ``payload``, as one chunk where the client knows chunks."""
        if not self.is_closed:
            self._write(b"%x\r\n%b\r\n" % (len(payload), payload) if self._is_chunked else payload)

    def leave_unchunked(self) -> None:
        """Send frames as they are; to be called before the response head, which must not name a length."""
        self._is_chunked = False
        self._protocol.leave_unchunked(self)

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` each time the peer has caught up."""
        self._writable_callback = callback

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the peer has left, at once if it has already."""
        if self.is_closed:
            callback()
            return
        self._close_callbacks.append(callback)
        # A large body pauses reading, and with it the news that the peer has left.
        self._flow.resume_reading()

    def abort(self) -> None:
        """Cut the connection without sending what is buffered."""
        self._transport.abort()
        self._protocol.mark_closed()

    def notify_writable(self, is_writable: bool) -> None:
        """Learn that the peer reads too slowly, or has caught up."""
        self.is_writable = is_writable and not self.is_closed
        if self.is_writable and self._writable_callback is not None:
            self._writable_callback()

    def notify_closed(self) -> None:
        """Learn that the peer has left."""
        self.is_closed = True
        self.is_writable = False
        callbacks = self._close_callbacks
        self.release()
        for callback in callbacks:
            callback()

    def release(self) -> None:
        """Forget the callbacks, whose owners hold this transport."""
        self._writable_callback = None
        self._close_callbacks = []


class HttpProtocol(HttpToolsProtocol):
    """One HTTP connection."""

    _discarded_bytes = 0  # of the current request, after its answer
    _head_bytes = 0  # received for the head that is still incomplete, about
    _head_timer: asyncio.TimerHandle | None = None
    _open: deque[tuple[BodyTransport, RequestResponseCycle]]  # the requests that are not answered yet, oldest first

    def connection_made(self, transport: Any) -> None:
        """Prepare the connection."""
        super().connection_made(transport)
        self._open = deque()
        if (sock := transport.get_extra_info("socket")) is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; a head without end is cut off, for the parser would keep all of it."""
        is_between = self.cycle is None or self.cycle.response_complete
        super().data_received(without_h2c_offer(data) if is_between or self._head_timer is not None else data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The request head is too large.")

    def on_headers_complete(self) -> None:
        """Put the body's transport into the scope, before the application's task first runs."""
        self._stop_awaiting_head()
        super().on_headers_complete()
        if "path" in self.scope:  # not for an upgrade to a WebSocket
            body = BodyTransport(self, self.cycle)
            self._open.append((body, self.cycle))
            cast(dict[str, Any], self.scope)["extensions"] = {EXTENSION: body}

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        self._discarded_bytes = 0
        self._await_head()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; what comes after an early answer is read over, up to a limit."""
        super().on_body(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()

    def on_response_complete(self) -> None:
        """Drop the transport of the response that has just been completed."""
        if self._open:
            self._open.popleft()[0].release()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Learn from the transport that its buffer is full."""
        super().pause_writing()
        for body, _ in self._open:
            body.notify_writable(False)

    def resume_writing(self) -> None:
        """Learn from the transport that its buffer has drained."""
        super().resume_writing()
        for body, _ in tuple(self._open):
            body.notify_writable(True)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one whose peer does not take the last response is cut."""
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everybody that the peer has left, and let go of the requests."""
        self._stop_awaiting_head()
        self.mark_closed()
        super().connection_lost(exc)
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]

    def leave_unchunked(self, transport: BodyTransport) -> None:
        """Have the response to which ``transport`` belongs written without chunks."""
        for body, cycle in self._open:
            if body is transport:
                cycle.chunked_encoding = False

    def mark_closed(self) -> None:
        """Tell all open bodies that the peer has left. Idempotent."""
        requests, self._open = self._open, deque()
        for body, cycle in requests:
            # A pipelined request behind this one would otherwise be the only one to learn of it.
            cycle.disconnected = True
            cycle.message_event.set()
            body.notify_closed()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _stop_awaiting_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
