"""uvicorn's HTTP protocol with a direct way for streamed bodies: one ``transport.write`` per frame.

Each request finds its ``FrameTransport`` in ``scope["extensions"]["aserve.transport"]``. It may write once the
response head has been sent with chunked encoding, and not after the response was completed.
"""

import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "aserve.transport"

# What the kernel may hold beyond what the peer's window takes: without it, a peer that does not read is
# noticed only after megabytes.
NOT_SENT_BYTES = 64 * 1024


# A client that sends a body too large to be taken reads the answer after it has sent all of it.
MAX_DISCARDED_BYTES = 64 * 2**20


class BodyTransport:
    """The body of one response, as a ``FrameTransport``."""

    def __init__(self, protocol: "HttpProtocol", cycle: RequestResponseCycle) -> None:
        self.is_closed = False
        self._protocol = protocol
        self._cycle = cycle
        self._write = cycle.transport.write
        self._flow = cycle.flow
        self._writable_callback: Callable[[], None] | None = None
        self._close_callbacks: list[Callable[[], None]] = []

    @property
    def is_writable(self) -> bool:
        """True while the peer keeps up and is there."""
        return not self._flow.write_paused and not self.is_closed

    def write_frame(self, payload: bytes) -> None:
        """Send ``payload`` as one chunk."""
        if not self.is_closed:
            self._write(b"%x\r\n%b\r\n" % (len(payload), payload))

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
        self._cycle.transport.abort()
        self._protocol.mark_closed()

    def notify_writable(self) -> None:
        """Learn that the connection is writable again."""
        if self._writable_callback is not None and not self.is_closed:
            self._writable_callback()

    def notify_closed(self) -> None:
        """Learn that the peer has left."""
        self.is_closed = True
        self._writable_callback = None
        # A pipelined request behind this one would otherwise be the only one to learn of it.
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        callbacks, self._close_callbacks = self._close_callbacks, []
        for callback in callbacks:
            callback()


class HttpProtocol(HttpToolsProtocol):
    """One HTTP connection."""

    _discarded_bytes = 0  # of the current request, after its answer
    _bodies: deque[BodyTransport]  # of the requests that are not answered yet, oldest first

    def connection_made(self, transport: Any) -> None:
        """Prepare the connection."""
        super().connection_made(transport)
        self._bodies = deque()
        if (sock := transport.get_extra_info("socket")) is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)

    def on_headers_complete(self) -> None:
        """Put the body's transport into the scope, before the application's task first runs."""
        super().on_headers_complete()
        if "path" in self.scope:  # not for an upgrade to a WebSocket
            body = BodyTransport(self, self.cycle)
            self._bodies.append(body)
            cast(dict[str, Any], self.scope)["extensions"] = {EXTENSION: body}

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        self._discarded_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; what comes after an early answer is read over, up to a limit."""
        super().on_body(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()

    def on_response_complete(self) -> None:
        """Drop the transport of the response that has just been completed."""
        if self._bodies:
            self._bodies.popleft()
        super().on_response_complete()

    def resume_writing(self) -> None:
        """Learn from the transport that its buffer has drained."""
        super().resume_writing()
        if self._bodies:
            self._bodies[0].notify_writable()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one whose peer does not take the last response is cut."""
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everybody that the peer has left."""
        self.mark_closed()
        super().connection_lost(exc)

    def mark_closed(self) -> None:
        """Tell all open bodies that the peer has left. Idempotent."""
        bodies, self._bodies = self._bodies, deque()
        for body in bodies:
            body.notify_closed()
