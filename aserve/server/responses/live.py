"""Responses that may outlive their client: background ones, and those that were made resumable.

client is there     a reader of the log
client is lost      background: goes on; else cancelled after the grace period unless somebody reads again
response has ended  its events can be read for the grace period more, and a socket that resumes it can continue it;
                    the response itself is in the archive, if it was to be stored
"""

import asyncio
from collections.abc import Callable

from aserve.errors import AserveError, CapacityError
from aserve.server.responses.event_log import EventLog, LogReader
from aserve.server.responses.events import ResponseStatus
from aserve.server.responses.run import LastTurn, ResponseRun
from aserve.server.stream_sink import Outlet

MAX_RUNNING = 256
MAX_ENDED = 256  # whose events are kept
MAX_ENDED_BYTES = 1 << 30  # of their events, unless one alone has more


def _unchanged(frame: bytes) -> bytes:
    return frame


class LiveResponse:
    """One such response and its log."""

    def __init__(self, grace_s: float, *, background: bool) -> None:
        self.log = EventLog()
        self.outlet = Outlet(self.log)
        self.run: ResponseRun | None = None  # until it has ended
        self.last_turn: LastTurn | None = None  # once it has, if it can be continued
        self._grace_s = grace_s
        self._background = background
        self._timer: asyncio.TimerHandle | None = None
        self.outlet.open()

    def follow(
        self, outlet: Outlet, start: int, on_end: Callable[[], None], shape: Callable[[bytes], bytes] = _unchanged
    ) -> LogReader:
        """Return a reader that begins at event number ``start``; raise ClientError if that one is not here."""
        reader = LogReader(self.log, outlet, start, on_end, shape)
        if self.run is not None:
            self._stop_timer()
        reader.read()
        return reader

    def leave(self, reader: LogReader) -> None:
        """Take a reader away; without any, the grace period begins. Idempotent."""
        reader.detach()
        if self.run is not None and not self._background and not self.log.has_readers and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._give_up)

    def end(self, on_forgotten: Callable[[], None]) -> None:
        """Close the log behind the last event; ``on_forgotten`` is called when nobody can read it any more."""
        self._stop_timer()
        if self.run is not None:
            self.last_turn = self.run.last_turn()
            self.run = None
        self.log.complete()
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, on_forgotten)

    def close(self) -> None:
        """Stop what runs for this response, and let its readers go. Idempotent."""
        self._stop_timer()
        if self.run is not None:
            self.run.close()
            self.run = None
        self.log.complete()

    def _give_up(self) -> None:
        self._timer = None
        if self.run is not None:
            self.run.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LiveResponses:
    """All of one server, by id."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._running: dict[str, LiveResponse] = {}
        self._ended: dict[str, LiveResponse] = {}  # oldest first
        self._ended_bytes = 0

    def __len__(self) -> int:
        """Return how many run."""
        return len(self._running)

    def begin(self, response_id: str, *, background: bool) -> LiveResponse:
        """Return the place for a new response; raises CapacityError if too many run."""
        if len(self._running) >= MAX_RUNNING:
            raise CapacityError("too many background responses are running", status=429)
        live = self._running[response_id] = LiveResponse(self._grace_s, background=background)
        return live

    def note_end(self, response_id: str) -> None:
        """Learn that the last event of a response is in its log."""
        live = self._running.pop(response_id, None)
        if live is None:
            return
        self._ended[response_id] = live
        self._ended_bytes += live.log.num_bytes
        live.end(lambda: self.forget(response_id))
        while len(self._ended) > MAX_ENDED or (self._ended_bytes > MAX_ENDED_BYTES and len(self._ended) > 1):
            self.forget(next(iter(self._ended)))

    def find(self, response_id: str) -> LiveResponse | None:
        """Return the response if it runs, or has ended a short time ago."""
        return self._running.get(response_id) or self._ended.get(response_id)

    def find_running(self, response_id: str) -> ResponseRun | None:
        """Return the run of the response while it goes on."""
        live = self._running.get(response_id)
        return None if live is None else live.run

    def forget(self, response_id: str) -> None:
        """Let go of a response, and of what runs for it. Idempotent."""
        live = self._running.pop(response_id, None)
        if live is None and (live := self._ended.pop(response_id, None)) is not None:
            self._ended_bytes -= live.log.num_bytes
        if live is not None:
            live.close()

    def shut_down(self, error: AserveError) -> None:
        """End all of them with ``error``."""
        for live in tuple(self._running.values()):
            if live.run is not None and live.run.status is ResponseStatus.IN_PROGRESS:
                live.run.end(error)
        for response_id in (*self._running, *self._ended):
            self.forget(response_id)
