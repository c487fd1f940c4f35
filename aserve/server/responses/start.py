"""From a checked request to a run: ids, events, the archive and the log, the same for HTTP and WebSocket."""

import time
from uuid import uuid4

from aserve.errors import ClientError
from aserve.server.responses.events import ResponseEvents
from aserve.server.responses.kept import EndedResponse
from aserve.server.responses.live import LiveResponse
from aserve.server.responses.run import Framing, ResponseRun, sse_frames
from aserve.server.responses.schema import ResponseRequest
from aserve.server.state import ServerState
from aserve.server.stream_sink import Outlet


def new_run(
    state: ServerState,
    request: ResponseRequest,
    outlet: Outlet,
    frame: Framing,
    stream_id: str | None = None,
    lease: str | None = None,
) -> ResponseRun:
    """Return a run that ends with its client; its KV pages are kept for the next turn of ``lease``."""
    events = _new_events(state, request, stream_id)
    return ResponseRun(
        request,
        events,
        state.engine,
        state.answer_style,
        outlet,
        frame=frame,
        on_end=_Archiving(state, request),
        lease=lease,
    )


def new_live(
    state: ServerState, request: ResponseRequest, lease: str | None = None
) -> tuple[LiveResponse, ResponseRun]:
    """Return a run that writes into a log. Its events are framed for HTTP and name no lane: readers add theirs."""
    events = _new_events(state, request, None)
    response_id = events.response_id
    live = state.live_responses.begin(response_id, background=request.background)
    live.run = ResponseRun(
        request,
        events,
        state.engine,
        state.answer_style,
        live.outlet,
        frame=sse_frames,
        on_end=_Archiving(state, request),
        on_written=lambda: state.live_responses.note_end(response_id),
        lease=lease,
    )
    return live, live.run


def previous_not_found() -> ClientError:
    """Return the error for a continuation of what is not known."""
    return ClientError(
        "the previous response is not known here (any more); send the whole input without it",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def new_id(prefix: str) -> str:
    """Return an id that no other object has."""
    return f"{prefix}_{uuid4().hex}"


def _new_events(state: ServerState, request: ResponseRequest, stream_id: str | None) -> ResponseEvents:
    return ResponseEvents(
        request,
        response_id=new_id("resp"),
        model=state.check_model(request.model),
        created_at=int(time.time()),
        stream_id=stream_id,
    )


class _Archiving:
    """Puts a response that asks for it into the archive when it ends."""

    def __init__(self, state: ServerState, request: ResponseRequest) -> None:
        self._archive = state.archive
        self._is_kept = request.is_kept
        self._created_s = int(time.time())

    def __call__(self, run: ResponseRun) -> None:
        if self._is_kept:
            self._archive.keep(EndedResponse(run.kept(), run.new_items, run.events.snapshot(), self._created_s))
