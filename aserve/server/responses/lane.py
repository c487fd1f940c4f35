"""A lane of a Responses WebSocket: creates run one after another, the latest response can be continued.

The default lane has no ``stream_id``. Nothing here outlives the socket, but for what is resumable. A response that was
steered is followed by its successor before the next create has its turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from aserve.errors import ClientError, NotFoundError
from aserve.server.responses.events import ResponseStatus, payload_of
from aserve.server.responses.input import read_input, unsupported
from aserve.server.responses.item_references import resolve_references
from aserve.server.responses.kept import KeptResponse
from aserve.server.responses.lane_steering import LaneSteering
from aserve.server.responses.live import LiveResponse
from aserve.server.responses.run import LastTurn, ResponseRun, socket_frames
from aserve.server.responses.schema import ResponseRequest, parse_create, read_resume
from aserve.server.responses.start import new_id, new_live, new_run, previous_not_found
from aserve.server.state import ServerState
from aserve.server.stream_sink import Outlet


@dataclass(slots=True)
class QueuedCreate:
    """A message that waits for its turn; it is checked when that comes, so that errors keep the order."""

    payload: Mapping[str, Any]
    num_bytes: int
    is_cancelled: bool = False


class LaneOwner(Protocol):
    """The socket, as its lanes see it."""

    state: ServerState
    outlet: Outlet
    slots: asyncio.Semaphore  # one per response in flight

    def check_open(self) -> None:
        """Raise unless a new response may start."""

    def find_kept(self, response_id: str) -> KeptResponse | None:
        """Return the kept response of that id, in whatever lane."""

    def send_error(self, error: Exception, stream_id: str | None) -> None:
        """Send an error event."""

    async def drain(self) -> None:
        """Wait until the peer has read what was sent."""


@dataclass(slots=True)
class Lane:
    """Runs the creates of one ``stream_id`` in order."""

    stream_id: str | None
    owner: LaneOwner
    latest: KeptResponse | None = None
    lease: str = field(default_factory=lambda: new_id("lane"))
    queue: deque[QueuedCreate] = field(default_factory=deque)
    current: QueuedCreate | None = None  # whose turn it is
    running: ResponseRun | None = None
    is_busy: bool = False
    settings: ResponseRequest | None = None  # how the latest was asked for, without its items
    steering: LaneSteering = field(init=False)

    def __post_init__(self) -> None:
        self.steering = LaneSteering(self.owner.outlet, self.stream_id)

    async def run(self, on_idle: Callable[[], None]) -> None:
        """Run what is queued; call ``on_idle`` when the queue is empty."""
        while self.queue:
            async with self.owner.slots:
                await self.owner.drain()
                self.current = self.queue.popleft()
                await self._take_turn(self.current)
                self.current = None
        self.is_busy = False
        on_idle()

    def cancel(self) -> None:
        """Cancel what runs, else the create whose turn is next; nothing to do in an idle lane."""
        if self.running is not None and self.running.status is ResponseStatus.IN_PROGRESS:
            self.running.cancel()
        elif self.current is not None:  # what it continues is being looked up, or its successor about to be made
            self.current.is_cancelled = True
        elif self.queue:  # its task has not come to it yet, or waits for a slot or for the peer
            self.queue[0].is_cancelled = True

    async def _take_turn(self, create: QueuedCreate) -> None:
        """Answer one create, and what steers the answer."""
        await self._respond(create)
        while self.steering.waiting and not self.steering.park():
            await self._succeed(create)
        self.steering.end()

    async def _succeed(self, create: QueuedCreate) -> None:
        """Run the successor of the response that was steered; hand its input back if there can be none."""
        try:
            request = self.steering.successor()
            self.owner.check_open()
            await self._generate(request, self.latest, create)
        except Exception as error:  # as for a create
            if not self.steering.waiting:  # it had begun
                self.owner.send_error(error, self.stream_id)
            self.steering.hand_back(error)

    async def _respond(self, create: QueuedCreate) -> None:
        """Answer one create, with a response or an error event."""
        payload = create.payload
        try:
            self.owner.check_open()
            if payload["type"] == "response.resume":
                await self._resume(create)
                return
            fields = await resolve_references(payload, self.owner.state.archive)
            if payload["type"] == "response.append":
                request = self._appended(fields)
            else:
                request = parse_create(fields, self.owner.state.engine.limits.vocab_size)
            if request.background:
                raise unsupported("background", "background on a WebSocket")
            previous = await self._previous(request.previous_response_id)
            await self._generate(self.steering.continuation(request), previous, create)
        except Exception as error:  # one create's failure ends neither the lane nor the socket
            self._forget(payload.get("previous_response_id"))
            self.owner.send_error(error, self.stream_id)

    async def _generate(self, request: ResponseRequest, previous: KeptResponse | None, create: QueuedCreate) -> None:
        """Run one response; a failed continuation evicts what it continued."""
        state, outlet = self.owner.state, self.owner.outlet
        live: LiveResponse | None = None
        if request.outlives_client:
            live, run = new_live(state, request, self.lease)
        else:
            run = new_run(state, request, outlet, socket_frames, self.stream_id, self.lease)
        if create.is_cancelled:
            run.cancel()
        self.running = run
        try:
            await run.prepare(previous)
            run.open()
            self.steering.begin(run)
            if live is None:
                await run.wait()
            else:
                await self._follow(live, 0)
        finally:
            self.running = None
            if live is None:
                run.close()
            elif run.status is ResponseStatus.IN_PROGRESS and not live.log.end:  # refused before its first event
                state.live_responses.forget(run.response_id)
        self._keep(run)

    async def _resume(self, create: QueuedCreate) -> None:
        """Go on with the events of a response whose client was lost."""
        response_id, start = read_resume(create.payload)
        live = self.owner.state.live_responses.find(response_id)
        if live is None:
            raise NotFoundError("no such response can be resumed", param="response_id", code="response_not_found")
        live.log.check_start(start)
        run = self.running = live.run
        if run is not None:
            self.steering.begin(run)
            if create.is_cancelled:
                run.cancel()
        try:
            await self._follow(live, start)
        finally:
            self.running = None
        if run is None:
            self._go_on_from(live.last_turn)
        else:
            self._keep(run)

    async def _follow(self, live: LiveResponse, start: int) -> None:
        self.steering.hold_notices()
        try:
            await follow(live, self.owner.outlet, start, self.stream_id)
        finally:
            self.steering.release_notices()

    def _keep(self, run: ResponseRun) -> None:
        """Keep what has ended for the next turn, if it can be continued; it goes on if the peer was cut off from it."""
        if run.status is ResponseStatus.FAILED:
            self._forget(run.request.previous_response_id)
        else:
            self._go_on_from(run.last_turn())

    def _go_on_from(self, turn: LastTurn | None) -> None:
        if turn is not None:
            self.latest, self.settings = turn.kept, turn.settings

    def _appended(self, payload: Mapping[str, Any]) -> ResponseRequest:
        """Return the request that goes on from the latest response with the same settings and new input."""
        if self.latest is None or self.settings is None:
            raise previous_not_found()
        items = read_input(payload.get("input"))
        if not items:
            raise ClientError("input is required", param="input", code="missing_required_parameter")
        previous_id = self.latest.response_id
        return replace(self.settings, items=items, previous_response_id=previous_id, generate=True)

    async def _previous(self, previous_id: str | None) -> KeptResponse | None:
        """Return what is continued, None for a new conversation."""
        if previous_id is None:
            return None
        kept = self.owner.find_kept(previous_id) or await self.owner.state.archive.find_kept(previous_id)
        if kept is None:
            raise previous_not_found()
        return kept

    def _forget(self, response_id: object) -> None:
        if self.latest is not None and self.latest.response_id == response_id:
            self.latest = None
            self.owner.state.engine.end_lease(self.lease)

    def close(self) -> None:
        """Give up what was kept for a next turn."""
        self.latest = None
        self.owner.state.engine.end_lease(self.lease)


async def follow(live: LiveResponse, outlet: Outlet, start: int, stream_id: str | None) -> None:
    """Pass on the events of ``live`` from number ``start`` to its last; raise ClientError if it has no such number."""
    ended = asyncio.Event()
    lane = b"" if stream_id is None else b'"stream_id":"%b",' % stream_id.encode()
    reader = live.follow(outlet, start, ended.set, lambda frame: b"{" + lane + payload_of(frame)[1:])
    try:
        await ended.wait()
    finally:
        live.leave(reader)
