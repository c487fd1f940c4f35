"""The narrow view of a connection that a stream sink writes to: frames out, backpressure in.

The server's protocol classes put one into ``scope["extensions"][EXTENSION]``, so that a
token goes from commit to the socket without a task, a queue or an ASGI message.
"""

from collections.abc import Callable
from typing import Protocol

EXTENSION = "aserve.transport"


class FrameTransport(Protocol):
    """One connection (WebSocket) or one response body (SSE)."""

    @property
    def is_writable(self) -> bool:
        """False while the peer reads too slowly (above the high-water mark) or is gone."""

    @property
    def is_closed(self) -> bool:
        """True once the peer has left or the connection was closed; writes are then dropped."""

    def write_frame(self, payload: bytes) -> None:
        """Send one text frame or one body chunk with a single write to the socket's transport."""

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` each time the connection becomes writable again; None takes it away."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the peer has left or the connection was closed."""

    def abort(self) -> None:
        """Cut the connection at once, without waiting for unsent data."""
