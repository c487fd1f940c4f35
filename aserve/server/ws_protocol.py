"""uvicorn's WebSocket protocol with a direct way for text frames: one ``transport.write`` per frame.

The application finds the connection itself, as a ``FrameTransport``, in
``scope["extensions"][EXTENSION]``. Frames written there and the protocol's own (handshake, ping, pong, close)
never interleave, because both sides write whole frames synchronously.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame
from websockets.http11 import Request

from aserve.server.transport import EXTENSION

FINAL_TEXT = 0x81  # FIN and opcode 1; a server's frames are not masked (RFC 6455, 5.2)
MEDIUM_HEADER = struct.Struct("!BBH").pack
LONG_HEADER = struct.Struct("!BBQ").pack


def text_frame_header(payload_len: int) -> bytes:
    """Return the header of an unfragmented text frame from a server."""
    if payload_len < 126:
        return bytes((FINAL_TEXT, payload_len))
    if payload_len < 65536:
        return MEDIUM_HEADER(FINAL_TEXT, 126, payload_len)
    return LONG_HEADER(FINAL_TEXT, 127, payload_len)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket connection; implements ``FrameTransport``.

    ``is_closed`` before the handshake, once a close frame went either way, and when the peer is gone. Both flags are
    plain attributes, kept up to date where they change, because they are looked at for every token.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._writable_callback: Callable[[], None] | None = None
        self._close_callbacks: list[Callable[[], None]] = []
        self._has_ended = False
        self.is_closed = True
        self.is_writable = False
        self._deflates = False
        self._late_pongs = b""
        self._abort_timer: asyncio.TimerHandle | None = None

    def write_frame(self, payload: bytes) -> None:
        """Send ``payload`` (UTF-8) as one text frame; dropped once the connection is closed."""
        if not self.is_closed and not self._deflates:
            size = len(payload)
            header = MEDIUM_HEADER(FINAL_TEXT, 126, size) if 125 < size < 65536 else text_frame_header(size)
            self.transport.write(header + payload)
        elif not self.is_closed:
            self.conn.send_text(payload)
            self.transport.write(b"".join(self.conn.data_to_send()))

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` each time the peer has caught up; replaces the previous one."""
        self._writable_callback = callback

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the connection closes, or at once if it has."""
        if self._has_ended:
            callback()
        else:
            self._close_callbacks.append(callback)

    async def drain(self) -> None:
        """Return once the peer keeps up, or is gone."""
        await self.writable.wait()

    def close(self, code: int, reason: str = "") -> None:
        """Start the closing handshake; a peer that does not answer within the close timeout is cut off."""
        if self.is_closed:
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()  # for the peer's answer
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)
        self._mark_closed()

    def abort(self) -> None:
        """Cut the connection without sending what is buffered."""
        self.transport.abort()
        self._mark_closed()

    def start_keepalive(self) -> None:
        """Open for frames: called when the handshake is complete."""
        super().start_keepalive()
        self._deflates = bool(self.conn.extensions)  # there is no other that is offered
        self.is_closed = self._has_ended
        self.is_writable = not self._has_ended

    def pause_writing(self) -> None:
        """Learn from the transport that its buffer is full."""
        super().pause_writing()
        self.is_writable = False

    def resume_writing(self) -> None:
        """Learn from the transport that its buffer has drained."""
        super().resume_writing()
        self.is_writable = not self.is_closed
        self._send_late_pongs()
        if self._writable_callback is not None and not self.is_closed:
            self._writable_callback()

    def handle_connect(self, event: Request) -> None:
        """Put this connection into the scope before the application's task first runs."""
        super().handle_connect(event)
        if hasattr(self, "scope"):  # not after a refused handshake
            extensions = cast(dict[str, Any], self.scope["extensions"])
            extensions[EXTENSION] = self

    async def send(self, message: ASGISendEvent) -> None:
        """Take a message from the application."""
        await super().send(message)
        if self.close_sent:
            self._mark_closed()

    def handle_ping(self) -> None:
        """Answer; a peer that reads too slowly gets the newest pongs later, so that pings cannot fill the buffer."""
        if pongs := self.conn.data_to_send():  # those of all pings that came together
            self._late_pongs = b"".join(pongs)
        if self.writable.is_set():
            self._send_late_pongs()

    def handle_close(self, event: Frame) -> None:
        """Answer the peer's close frame; what it does not read within the close timeout is dropped."""
        super().handle_close(event)
        self._finish_closing()

    def handle_parser_exception(self) -> None:
        """Close with the code that fits the peer's violation (1002, 1007 or 1009)."""
        super().handle_parser_exception()
        self._finish_closing()

    def keepalive_timeout(self) -> None:
        """Close a connection whose peer did not answer a ping."""
        super().keepalive_timeout()
        self._finish_closing()

    def shutdown(self) -> None:
        """Close with 1012 when the server stops."""
        super().shutdown()
        self._finish_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everybody that the peer is gone."""
        super().connection_lost(exc)
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None
        self._mark_closed()

    def _send_late_pongs(self) -> None:
        if self._late_pongs and not self.is_closed:
            self.transport.write(self._late_pongs)
        self._late_pongs = b""

    def _finish_closing(self) -> None:
        # transport.close() first flushes, which a peer that does not read can put off for ever.
        if not self._has_ended and self._abort_timer is None:
            self._abort_timer = self.loop.call_later(self.close_timeout, self.transport.abort)
        self._mark_closed()

    def _mark_closed(self) -> None:
        if self._has_ended:
            return
        self._has_ended = self.is_closed = True
        self.is_writable = False
        self._writable_callback = None
        callbacks, self._close_callbacks = self._close_callbacks, []
        for callback in callbacks:
            callback()
