"""A connection that ends in this process: frames wait in memory until whoever reads them comes."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

HIGH_WATER_BYTES = 64 * 1024  # above which sinks merge what they have, as for a peer that reads slowly


class LocalTransport:
    """A ``FrameTransport`` without a socket; its reader takes frames with ``frames``."""

    def __init__(self) -> None:
        self.is_closed = False
        self._frames: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_finished = False
        self._has_news = asyncio.Event()
        self._writable_callback: Callable[[], None] | None = None
        self._close_callbacks: list[Callable[[], None]] = []

    @property
    def is_writable(self) -> bool:
        """False while the reader is behind or has left."""
        return not self.is_closed and self._num_bytes < HIGH_WATER_BYTES

    def write_frame(self, payload: bytes) -> None:
        """Keep ``payload`` for the reader."""
        if not self.is_closed:
            self._frames.append(payload)
            self._num_bytes += len(payload)
            self._has_news.set()

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` each time the reader has caught up."""
        self._writable_callback = callback

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the reader has left, at once if it has already."""
        if self.is_closed:
            callback()
        else:
            self._close_callbacks.append(callback)

    def abort(self) -> None:
        """Drop what is unread; the reader's iteration ends."""
        self.finish()
        self.close()

    def finish(self) -> None:
        """End the reader's iteration after the last frame."""
        self._is_finished = True
        self._has_news.set()

    def close(self) -> None:
        """Learn that the reader has left. Idempotent."""
        self.is_closed = True
        self._frames.clear()
        self._num_bytes = 0
        callbacks, self._close_callbacks = self._close_callbacks, []
        for callback in callbacks:
            callback()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield frames as they come, until ``finish``."""
        while True:
            while self._frames:
                frame = self._frames.popleft()
                self._take(len(frame))
                yield frame
            if self._is_finished:
                return
            self._has_news.clear()
            await self._has_news.wait()

    def _take(self, num_bytes: int) -> None:
        was_writable = self.is_writable
        self._num_bytes -= num_bytes
        if not was_writable and self.is_writable and self._writable_callback is not None:
            self._writable_callback()
