"""What one WebSocket of ``/v1/responses`` is doing: its lanes, its limits and how it ends.

Messages are handed in one by one and never wait for a generation: each lane runs its creates in a task of its own.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Protocol

from aserve.errors import AserveError, CapacityError, ClientError, NotFoundError
from aserve.server.errors import report_error
from aserve.server.json_body import parse_json
from aserve.server.responses.events import error_event
from aserve.server.responses.kept import KeptResponse
from aserve.server.responses.lane import Lane, QueuedCreate
from aserve.server.responses.run import ResponseRun
from aserve.server.responses.start import new_id
from aserve.server.responses.steer import FAILED, SteerError, read_steer, steer_event
from aserve.server.state import ServerState
from aserve.server.stream_sink import Outlet
from aserve.server.transport import FrameTransport

MAX_NAMED_LANES = 32
MAX_IN_FLIGHT = 16
MAX_QUEUED = 64
MAX_QUEUED_FRAMES = 2  # bytes that wait, in frames of the largest size
QUEUED_KINDS = ("response.create", "response.append", "response.resume")  # answered in the order of their lane
KNOWN_KINDS = (*QUEUED_KINDS, "response.cancel", "response.steer")
STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")

GOING_AWAY = 1001  # clients that may reconnect do so on these
SERVICE_RESTART = 1012


class SocketTransport(FrameTransport, Protocol):
    """A WebSocket, with what a session needs besides frames."""

    def close(self, code: int, reason: str = "") -> None:
        """Start the closing handshake; nothing is sent after it."""

    async def drain(self) -> None:
        """Return once the peer keeps up, or is gone."""


class ResponsesSession:
    """The state of one socket; its tasks live in ``tasks`` and end with ``close``."""

    def __init__(self, state: ServerState, transport: SocketTransport, tasks: asyncio.TaskGroup) -> None:
        self.state = state
        self.outlet = Outlet(transport)
        self.slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self.drain = transport.drain
        self._transport = transport
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._lanes: dict[str | None, Lane] = {None: Lane(None, self)}
        self._retirement: AserveError | None = None  # why no new response may start
        self._retirement_code = GOING_AWAY
        self._age_timer = asyncio.get_running_loop().call_later(state.config.max_connection_age_s, self._expire)
        self.outlet.open()

    async def receive(self, text: str) -> None:
        """Act on one message; whatever is wrong with it is answered with an error event."""
        stream_id: str | None = None
        try:
            message = await parse_json(text.encode())
            if not isinstance(message, dict):
                raise ClientError("a message must be a JSON object", code="invalid_json")
            if message.get("type") == "response.steer":  # the response that it names has a lane already
                self._steer(message, len(text))
                return
            stream_id = _read_stream_id(message)
            self._dispatch(message, stream_id, len(text))
        except AserveError as error:
            self.send_error(error, stream_id)

    def close(self) -> None:
        """End everything that runs for this socket. Idempotent."""
        self._age_timer.cancel()
        self.outlet.close()
        for task in self._running:
            task.cancel()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()  # they refer back to this session, with all that was said in them

    def begin_drain(self) -> None:
        """Take no new responses; close the socket when the running ones are done."""
        self._retire(CapacityError("the server is shutting down", retry_after_s=5), SERVICE_RESTART)

    def shut_down(self, error: AserveError) -> None:
        """Fail what runs and close the socket now."""
        for lane in self._lanes.values():
            if lane.running is not None:
                lane.running.end(error)
        self._transport.close(SERVICE_RESTART, "the server is shutting down")

    def check_open(self) -> None:
        """Raise unless a new response may start."""
        if self._retirement is not None:
            raise self._retirement
        self.state.check_ready()

    def find_kept(self, response_id: str) -> KeptResponse | None:
        """Return the latest response of the lane that has this one, if any has."""
        for lane in self._lanes.values():
            if lane.latest is not None and lane.latest.response_id == response_id:
                return lane.latest
        return None

    def send_error(self, error: Exception, stream_id: str | None) -> None:
        """Send an error event."""
        report = report_error(error)
        self.outlet.write(error_event(report.status, report.event_error(), stream_id))

    def _dispatch(self, message: Mapping[str, Any], stream_id: str | None, num_bytes: int) -> None:
        kind = message.get("type")
        if kind in QUEUED_KINDS:
            self._queue(message, stream_id, num_bytes)
        elif kind == "response.cancel":
            self._cancel(message.get("response_id"), stream_id)
        elif kind != "response.processed":  # an acknowledgement that needs no answer
            shown = f"{kind[:64]!r}" if isinstance(kind, str) else "missing"
            raise ClientError(
                f"the event type is {shown}; known: {', '.join(KNOWN_KINDS)}", param="type", code="unknown_event_type"
            )

    def _queue(self, payload: Mapping[str, Any], stream_id: str | None, num_bytes: int) -> None:
        num_queued = sum(len(lane.queue) for lane in self._lanes.values())
        if num_queued >= MAX_QUEUED or not self._has_room(num_bytes):
            raise CapacityError("too many responses wait on this connection", status=429)
        lane = self._lane(stream_id)
        lane.queue.append(QueuedCreate(payload, num_bytes))
        if not lane.is_busy:
            lane.is_busy = True
            task = self._tasks.create_task(lane.run(self._close_if_idle))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _has_room(self, num_bytes: int) -> bool:
        """True if a message of that length may wait besides those that do."""
        lanes = self._lanes.values()
        creates = sum(create.num_bytes for lane in lanes for create in lane.queue)
        steers = sum(lane.steering.num_bytes for lane in lanes)
        return creates + steers + num_bytes <= MAX_QUEUED_FRAMES * self.state.config.max_frame_mib * 2**20

    def _lane(self, stream_id: str | None) -> Lane:
        lane = self._lanes.get(stream_id)
        if lane is None:
            if len(self._lanes) > MAX_NAMED_LANES:
                raise ClientError(
                    f"a connection has at most {MAX_NAMED_LANES} stream ids",
                    param="stream_id",
                    code="websocket_stream_limit_reached",
                )
            lane = self._lanes[stream_id] = Lane(stream_id, self)
        return lane

    def _cancel(self, response_id: object, stream_id: str | None) -> None:
        """Cancel the named response, else the lane's current one; one that has just ended needs nothing."""
        if response_id is None:
            lane = self._lanes.get(stream_id)
            if lane is not None:
                lane.cancel()
            return
        run = self._find_running(response_id) if isinstance(response_id, str) else None
        if run is not None:
            run.cancel()
        elif not isinstance(response_id, str) or self.find_kept(response_id) is None:
            raise NotFoundError("no such response runs here", param="response_id", code="response_not_found")

    def _find_running(self, response_id: str) -> ResponseRun | None:
        """Return the run of that id: that of a lane, or one that a lane could go on with, as it may be about to."""
        lanes = self._lanes.values()
        here = (lane.running for lane in lanes if lane.running is not None and lane.running.response_id == response_id)
        return next(here, None) or self.state.live_responses.find_running(response_id)

    def _steer(self, message: Mapping[str, Any], num_bytes: int) -> None:
        """Pass user input on to the response that it names, or hand it back."""
        steer = read_steer(message, new_id("steer"), num_bytes)
        lanes = self._lanes.values()
        lane = next((lane for lane in lanes if lane.steering.knows(steer.previous_response_id)), None)
        try:
            if lane is None:
                raise SteerError("response_not_found", "no such response runs on this connection")
            if "stream_id" in message:
                raise SteerError("invalid_input", "stream_id is not a field here: the response has its lane")
            if not self._has_room(num_bytes):
                raise SteerError("too_many_pending_steers", "too much waits on this connection")
            try:
                self.check_open()
            except AserveError as error:
                raise SteerError("successor_creation_failed", report_error(error).message) from error
            lane.steering.take(steer)
        except SteerError as error:
            if lane is not None:
                lane.steering.refuse(steer, error)
            else:
                self.outlet.write(steer_event(FAILED, steer.failure(error, was_accepted=False), 0, None))

    def _expire(self) -> None:
        age_min = self.state.config.max_connection_age_s / 60
        error = ClientError(
            f"the connection has reached its limit of {age_min:g} minutes; open a new one",
            code="websocket_connection_limit_reached",
        )
        loop = asyncio.get_running_loop()
        self._age_timer = loop.call_later(self.state.config.drain_timeout_s, self._finish_retirement)
        self._retire(error, GOING_AWAY)

    def _retire(self, reason: AserveError, code: int) -> None:
        self._retirement = reason
        self._retirement_code = code
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._retirement is not None and not any(lane.is_busy for lane in self._lanes.values()):
            self._finish_retirement()

    def _finish_retirement(self) -> None:
        assert self._retirement is not None
        if isinstance(self._retirement, ClientError):
            self.send_error(self._retirement, None)
        self._transport.close(self._retirement_code, str(self._retirement)[:120])


def _read_stream_id(message: Mapping[str, Any]) -> str | None:
    stream_id = message.get("stream_id")
    if stream_id is None:
        return None
    if not isinstance(stream_id, str) or STREAM_ID.fullmatch(stream_id) is None:
        raise ClientError(
            "stream_id must have 1 to 256 of the characters A-Z a-z 0-9 _ . -",
            param="stream_id",
            code="invalid_stream_id",
        )
    return stream_id
