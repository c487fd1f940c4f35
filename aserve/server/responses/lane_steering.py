"""What one lane knows about steering: the response that may be steered, and the input that waits for its successor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aserve.server.errors import report_error
from aserve.server.responses.events import ResponseStatus
from aserve.server.responses.items import Item
from aserve.server.responses.parked_steers import ParkedSteers
from aserve.server.responses.run import ResponseRun
from aserve.server.responses.schema import ResponseRequest
from aserve.server.responses.steer import ACCEPTED, FAILED, PENDING, Steer, SteerError, steer_event
from aserve.server.stream_sink import Outlet

MAX_STEERS = 16  # that wait for one successor
CREATION_FAILED = "successor_creation_failed"
CAN_BE_FOLLOWED = (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE)


@dataclass(slots=True)
class EndedResponse:
    """What is remembered of a lane's last response, to answer those who would steer it still."""

    response_id: str
    status: ResponseStatus
    next_number: int

    def take_number(self) -> int:
        """Return the next sequence number."""
        self.next_number += 1
        return self.next_number - 1


class LaneSteering:
    """Follows the responses of one lane: ``begin``, perhaps ``successor`` or ``park``, ``end`` when its turn is over.

    Steers are committed with the ``begin`` of the successor, or of the continuation that answers the target's calls;
    else they are handed back.
    """

    def __init__(self, outlet: Outlet, stream_id: str | None) -> None:
        self.waiting: list[Steer] = []  # accepted, for the successor of the target
        self._parked: ParkedSteers | None = None
        self._outlet = outlet
        self._stream_id = stream_id
        self._target: ResponseRun | None = None  # begun, without a successor that has
        self._ended: EndedResponse | None = None  # the target before, or the last one
        self._successor_items: list[Item] | None = None  # grow until the successor begins
        self._notices: list[bytes] = []  # events about the target, to go out behind its last one
        self._holds_notices = False

    def knows(self, response_id: str) -> bool:
        """True if that was the last response to begin in this lane, or the one before."""
        return any(one is not None and one.response_id == response_id for one in (self._target, self._ended))

    def begin(self, run: ResponseRun) -> None:
        """Learn that ``run`` has begun; what waited is part of it now."""
        self._unpark(run.request)
        self.end()
        self._target = run
        self._successor_items = None
        self.waiting.clear()

    def end(self) -> None:
        """Learn that nothing more follows the target."""
        if self._target is not None:
            events = self._target.events
            self._ended = EndedResponse(events.response_id, self._target.status, events.next_number)
            self._target = None

    def take(self, steer: Steer) -> None:
        """Accept input for the successor of the target, which ends early for it; raises SteerError."""
        target, items = self._target, steer.items
        if self._parked is not None and self._parked.response_id == steer.previous_response_id:
            _check_count(self._parked.steers)
            self._tell(steer, ACCEPTED, steer.fields())
            self._park(self._parked, steer)
            return
        if target is None or target.response_id != steer.previous_response_id:
            assert self._ended is not None, "a lane was asked for a response that it does not know"
            raise _too_late(self._ended.status)
        if not target.request.generate:
            raise SteerError("steering_not_supported", "a warm-up has no output that could be steered")
        is_running = target.status is ResponseStatus.IN_PROGRESS
        if (is_running and target.is_cancelled) or not (is_running or self.waiting):
            raise _too_late(target.status)
        _check_count(self.waiting)
        self.waiting.append(steer)
        self._tell(steer, ACCEPTED, steer.fields())
        if self._successor_items is not None:
            self._successor_items += items
        elif is_running:
            target.steer()

    def successor(self) -> ResponseRequest:
        """Return the request that follows the target: its settings, the new input; raises SteerError.

        Input that is accepted before it begins is added to it.
        """
        target = self._target
        assert target is not None
        if target.status not in CAN_BE_FOLLOWED:
            raise _too_late(target.status)
        self._successor_items = [item for steer in self.waiting for item in steer.items]
        return replace(target.request, items=self._successor_items, previous_response_id=target.response_id)

    def park(self) -> bool:
        """Let what waits wait for the results of the target's calls; False if it has none to wait for."""
        target = self._target
        if target is None or target.status not in CAN_BE_FOLLOWED:
            return False
        parked = ParkedSteers(target.response_id, target.events.items)
        if not parked.required_input:
            return False
        self._parked = parked
        waiting, self.waiting = self.waiting, []
        for steer in waiting:
            self._park(parked, steer)
        return True

    def continuation(self, request: ResponseRequest) -> ResponseRequest:
        """Return ``request`` with the input that waits for it, if any does."""
        if self._parked is None or self._parked.response_id != request.previous_response_id:
            return request
        return self._parked.joined(request)

    def refuse(self, steer: Steer, error: SteerError, *, was_accepted: bool = False) -> None:
        """Hand back input that named a response which this lane knows."""
        self._tell(steer, FAILED, steer.failure(error, was_accepted=was_accepted))

    def hand_back(self, error: Exception) -> None:
        """Refuse what waits: because of ``error`` it has no successor."""
        if not isinstance(error, SteerError):
            error = SteerError(CREATION_FAILED, report_error(error).message)
        waiting, self.waiting = self.waiting, []
        self._successor_items = None
        for steer in waiting:
            self.refuse(steer, error, was_accepted=True)

    @property
    def num_bytes(self) -> int:
        """The length of the messages of all that waits."""
        parked = () if self._parked is None else self._parked.steers
        return sum(steer.num_bytes for steer in (*self.waiting, *parked))

    def hold_notices(self) -> None:
        """Keep back what is to be told of a target that has ended: its last events are on their way still."""
        self._holds_notices = True

    def release_notices(self) -> None:
        """Write what was kept back."""
        self._holds_notices = False
        notices, self._notices = self._notices, []
        for notice in notices:
            self._outlet.release(len(notice))
            self._outlet.write(notice)

    def _park(self, parked: ParkedSteers, steer: Steer) -> None:
        parked.add(steer)
        self._tell(steer, PENDING, parked.pending_fields(steer))

    def _unpark(self, request: ResponseRequest) -> None:
        """Commit what is parked with the response of ``request``, or hand it back if that is no continuation."""
        parked, self._parked = self._parked, None
        if parked is not None and parked.response_id != request.previous_response_id:
            error = SteerError(CREATION_FAILED, "the lane has gone on without the results of the response's calls")
            for steer in parked.steers:
                self.refuse(steer, error, was_accepted=True)

    def _tell(self, steer: Steer, name: str, fields: Mapping[str, Any]) -> None:
        """Write an event with the next sequence number of the response that ``steer`` names."""
        target = self._target
        if target is None or target.response_id != steer.previous_response_id:
            assert self._ended is not None
            self._outlet.write(steer_event(name, fields, self._ended.take_number(), self._stream_id))
        elif target.status is ResponseStatus.IN_PROGRESS:
            target.tell(name, fields)
        else:
            self._write_behind(steer_event(name, fields, target.events.take_number(), self._stream_id))

    def _write_behind(self, notice: bytes) -> None:
        """Write what is to be told of a target that has ended, if its last event is written; a peer may be too slow."""
        if self._holds_notices:
            self._notices.append(notice)
            self._outlet.hold(len(notice))
        else:
            self._outlet.write(notice)


def _check_count(steers: Sequence[Steer]) -> None:
    if len(steers) >= MAX_STEERS:
        raise SteerError("too_many_pending_steers", f"{MAX_STEERS} inputs wait for the next response already")


def _too_late(status: ResponseStatus) -> SteerError:
    """Return the error for input that names a response which takes none any more."""
    if status is ResponseStatus.COMPLETED:
        return SteerError("response_already_completed", "the response has completed; continue it with response.create")
    return SteerError("response_not_active", "the response takes no more input; continue it with response.create")
