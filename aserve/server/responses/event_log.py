"""The events of a response that may outlive its client: written once, read from any place by any number of clients.

A log is the transport of its response, so the response writes into it as to a client that always keeps up. Readers
take frames from it at their own pace; one frame is one event, so a frame's place is its sequence number.
"""

from collections import deque
from collections.abc import Callable

from aserve.errors import ClientError
from aserve.server.stream_sink import Outlet

MAX_LOG_BYTES = 8 << 20  # of what one response says; the oldest events go first
NUM_REPEATS = 4  # events that repeat what was asked for, as the first does: created, queued, in_progress, the last
FRAMES_AT_ONCE = 64  # taken from the log before the outlet is asked again


class EventLog:
    """The newest frames of one response; implements ``FrameTransport`` for the side that writes."""

    is_writable = True
    is_closed = False

    def __init__(self) -> None:
        self.first = 0  # the number of the oldest frame that is kept
        self.is_complete = False
        self._frames: deque[bytes] = deque()
        self.num_bytes = 0
        self._max_bytes = MAX_LOG_BYTES
        self._readers: list[LogReader] = []

    @property
    def end(self) -> int:
        """The number of the frame that comes next."""
        return self.first + len(self._frames)

    @property
    def has_readers(self) -> bool:
        """True while anybody listens."""
        return bool(self._readers)

    def write_frame(self, payload: bytes) -> None:
        """Append one frame and pass it on."""
        if not self.end:
            self._max_bytes = MAX_LOG_BYTES + NUM_REPEATS * len(payload)
        self._frames.append(payload)
        self.num_bytes += len(payload)
        while self.num_bytes > self._max_bytes and len(self._frames) > 1:
            self.num_bytes -= len(self._frames.popleft())
            self.first += 1
        self._wake_readers()

    def complete(self) -> None:
        """Let readers end where the log ends."""
        self.is_complete = True
        self._wake_readers()

    def frames(self, start: int) -> list[bytes]:
        """Return some frames from number ``start`` on."""
        place = start - self.first
        # By index: an iterator would pass over all the frames before, for each new one of a long response.
        return [self._frames[index] for index in range(place, min(place + FRAMES_AT_ONCE, len(self._frames)))]

    def check_start(self, number: int) -> None:
        """Raise ClientError unless a reader may begin at ``number``."""
        if number < self.first:
            raise ClientError(
                f"the events before number {self.first} are not kept any more",
                param="starting_after",
                code="events_gone",
            )
        if number > self.end:
            raise ClientError(f"there are only {self.end} events yet", param="starting_after")

    def add_reader(self, reader: "LogReader") -> None:
        """Tell ``reader`` of every change from now on."""
        self._readers.append(reader)

    def remove_reader(self, reader: "LogReader") -> None:
        """Forget ``reader``. Idempotent."""
        if reader in self._readers:
            self._readers.remove(reader)

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """Do nothing: a log is always writable."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Do nothing: a log is never closed."""

    def abort(self) -> None:
        """Do nothing: a log takes everything."""

    def _wake_readers(self) -> None:
        for reader in tuple(self._readers):
            reader.read()


class LogReader:
    """One client of a log; ``on_end`` is called once, after its last frame or when it is cut off."""

    def __init__(
        self,
        log: EventLog,
        outlet: Outlet,
        start: int,
        on_end: Callable[[], None],
        shape: Callable[[bytes], bytes],
    ) -> None:
        """``shape`` turns a frame of the log into one of the outlet's transport. Raises as ``check_start`` does."""
        log.check_start(start)
        self._log = log
        self._outlet = outlet
        self._next = start
        self._on_end = on_end
        self._shape = shape
        self._is_waiting = False
        log.add_reader(self)

    def read(self) -> None:
        """Write what is new while the peer keeps up."""
        if self._is_waiting:
            return
        log, outlet = self._log, self._outlet
        while self._next < log.end:
            if not outlet.is_writable:
                self._is_waiting = True
                outlet.wait(self)
                return
            if self._next < log.first:
                outlet.cut_off("the events that it has not read are gone")
                self._finish()
                return
            for frame in log.frames(self._next):
                outlet.write(self._shape(frame))
                self._next += 1
        if log.is_complete:
            self._finish()

    def flush(self) -> None:
        """Go on: the peer has caught up."""
        self._is_waiting = False
        self.read()

    def detach(self) -> None:
        """Stop reading. Idempotent."""
        self._log.remove_reader(self)

    def _finish(self) -> None:
        self.detach()
        self._on_end()
