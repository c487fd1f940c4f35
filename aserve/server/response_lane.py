"""A lane of a Responses WebSocket: creates run one after another, the latest response can be continued.

The default lane has no ``stream_id``. Nothing here outlives the socket.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from aserve.errors import ClientError
from aserve.server.response_events import ResponseEvents, ResponseStatus
from aserve.server.response_items import Item, MessageItem
from aserve.server.response_run import ResponseRun
from aserve.server.response_schema import ResponseRequest, parse_create
from aserve.server.state import ServerState
from aserve.server.stream_sink import Outlet


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A finished response that a later create may continue. ``items`` are without instructions."""

    response_id: str
    items: list[Item]


@dataclass(slots=True)
class QueuedCreate:
    """A ``response.create`` that waits for its turn; it is checked when that comes, so that errors keep the order."""

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
    queue: deque[QueuedCreate] = field(default_factory=deque)
    running: ResponseRun | None = None
    is_busy: bool = False

    async def run(self, on_idle: Callable[[], None]) -> None:
        """Run what is queued; call ``on_idle`` when the queue is empty."""
        while self.queue:
            async with self.owner.slots:
                await self.owner.drain()
                await self._respond(self.queue.popleft())
        self.is_busy = False
        on_idle()

    def cancel(self) -> None:
        """Cancel what runs, else the create whose turn is next; nothing to do in an idle lane."""
        if self.running is not None:
            self.running.cancel()
        elif self.queue:  # its task has not come to it yet, or waits for a slot or for the peer
            self.queue[0].is_cancelled = True

    async def _respond(self, create: QueuedCreate) -> None:
        """Answer one create, with a response or an error event; a failed continuation evicts what it continued."""
        payload = create.payload
        previous_id = payload.get("previous_response_id")
        try:
            self.owner.check_open()
            request = parse_create(payload, self.owner.state.engine.limits.vocab_size)
            items = self._history(request.previous_response_id) + request.items
            status = await self._generate(request, items, is_cancelled=create.is_cancelled)
        except Exception as error:  # one create's failure ends neither the lane nor the socket
            self._forget(previous_id)
            self.owner.send_error(error, self.stream_id)
        else:
            if status is ResponseStatus.FAILED:
                self._forget(previous_id)

    async def _generate(self, request: ResponseRequest, items: list[Item], *, is_cancelled: bool) -> ResponseStatus:
        run = ResponseRun(request, self._new_events(request), self.owner.state.engine, self.owner.outlet)
        if is_cancelled:
            run.cancel()
        self.running = run
        try:
            status = await run.execute(_with_instructions(request.instructions, items))
        finally:
            self.running = None
            run.close()
        if status is not ResponseStatus.FAILED:
            self.latest = KeptResponse(run.response_id, items + run.events.items)
        return status

    def _new_events(self, request: ResponseRequest) -> ResponseEvents:
        return ResponseEvents(
            request,
            response_id=new_id("resp"),
            new_id=new_id,
            model=self.owner.state.check_model(request.model),
            created_at=int(time.time()),
            stream_id=self.stream_id,
        )

    def _history(self, previous_id: str | None) -> list[Item]:
        """Return the conversation that is continued, empty for a new one."""
        if previous_id is None:
            return []
        kept = self.owner.find_kept(previous_id)
        if kept is None:
            raise ClientError(
                "the previous response is not in this connection's memory; send the whole input without it",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return kept.items

    def _forget(self, response_id: object) -> None:
        if self.latest is not None and self.latest.response_id == response_id:
            self.latest = None


def _with_instructions(instructions: str | None, items: list[Item]) -> list[Item]:
    return items if instructions is None else [MessageItem("system", instructions), *items]


def new_id(prefix: str) -> str:
    """Return an id that no other object has."""
    return f"{prefix}_{uuid4().hex}"
