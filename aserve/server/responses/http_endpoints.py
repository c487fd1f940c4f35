"""The Responses API over HTTP: create (streamed, whole or in the background), read, cancel and delete."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from aserve.errors import AserveError, ClientError, NotFoundError
from aserve.server.generation import send_json, streamed_answer, transport_of
from aserve.server.json_body import ClientGoneError, read_json
from aserve.server.models import JsonEndpoint
from aserve.server.responses.item_references import resolve_references
from aserve.server.responses.kept import KeptResponse
from aserve.server.responses.live import LiveResponse
from aserve.server.responses.query import ItemPage, ResponseQuery
from aserve.server.responses.run import ResponseRun, sse_frames
from aserve.server.responses.schema import ResponseRequest, parse_create
from aserve.server.responses.start import new_live, new_run, previous_not_found
from aserve.server.sse import KEEP_ALIVE
from aserve.server.state import ServerState
from aserve.server.stream_sink import Outlet
from aserve.server.transport import FrameTransport


def http_responses_routes(state: ServerState) -> list[BaseRoute]:
    """Return the routes of the Responses API over HTTP."""
    one = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", CreateResponse(state), methods=["POST"]),
        Route("/v1/responses/compact", JsonEndpoint(refuse_compaction), methods=["POST"]),
        Route("/v1/responses/input_tokens", JsonEndpoint(partial(count_input_tokens, state)), methods=["POST"]),
        Route(one, StoredResponses(state), methods=["GET", "DELETE"]),
        Route(f"{one}/cancel", JsonEndpoint(partial(cancel, state)), methods=["POST"]),
        Route(f"{one}/input_items", JsonEndpoint(partial(list_input_items, state)), methods=["GET"]),
    ]


class CreateResponse:
    """POST /v1/responses as an ASGI application."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request, previous = await _read_request(self._state, scope, receive)
        if request.background or (request.is_resumable and request.is_streamed):
            await self._answer_from_log(request, previous, scope, send)
        else:
            await self._answer_directly(request, previous, scope, send)

    async def _answer_directly(
        self, request: ResponseRequest, previous: KeptResponse | None, scope: Scope, send: Send
    ) -> None:
        """Answer with a response that ends when its client leaves."""
        transport = transport_of(scope)
        outlet = Outlet(transport, KEEP_ALIVE) if request.is_streamed else Outlet(Unheard())
        run = new_run(self._state, request, outlet, sse_frames)
        tied = TiedRun(run, transport)
        self._state.register(tied)
        transport.on_close(run.close)
        try:
            await run.prepare(previous)
            if transport.is_closed:
                raise ClientGoneError
            if not request.is_streamed:
                await _answer_whole(run, outlet, transport, send)
                return
            async with streamed_answer(self._state, outlet, send):
                run.open()
                outlet.open()
                await run.wait()
        finally:
            self._state.unregister(tied)
            run.close()
            outlet.close()

    async def _answer_from_log(
        self, request: ResponseRequest, previous: KeptResponse | None, scope: Scope, send: Send
    ) -> None:
        """Answer with a response that may outlive its client."""
        live, run = new_live(self._state, request)
        try:
            await run.prepare(previous)
        except BaseException:
            self._state.live_responses.forget(run.response_id)
            raise
        run.open()
        if request.is_streamed:
            await _stream_log(self._state, live, 0, scope, send)
        else:
            await send_json(send, run.events.snapshot())


class StoredResponses:
    """GET and DELETE of one response as an ASGI application."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        response_id = scope["path_params"]["response_id"]
        if scope["method"] == "DELETE":
            await self._delete(response_id, send)
            return
        query = ResponseQuery.read(scope)
        if query.is_streamed:
            live = self._state.live_responses.find(response_id)
            if live is None:
                await _find_body(self._state, response_id)  # says so if there is no such response at all
                raise ClientError(
                    "the events of this response are not kept any more", param="stream", code="events_gone"
                )
            await _stream_log(self._state, live, query.start, scope, send)
            return
        await send_json(send, await _find_body(self._state, response_id))

    async def _delete(self, response_id: str, send: Send) -> None:
        is_live = self._state.live_responses.find(response_id) is not None
        self._state.live_responses.forget(response_id)
        if not (await self._state.archive.delete(response_id) or is_live):
            raise _not_found()
        await send_json(send, orjson.dumps({"id": response_id, "object": "response", "deleted": True}))


async def cancel(state: ServerState, scope: Scope, receive: Receive) -> orjson.Fragment:
    """Cancel a background response, and return it as it ends; one that has ended stays as it is."""
    response_id = scope["path_params"]["response_id"]
    run = state.live_responses.find_running(response_id)
    if run is not None:
        run.cancel()
        await run.wait()
        return orjson.Fragment(run.events.snapshot())  # it may be kept nowhere
    body = await _find_body(state, response_id)
    if not orjson.loads(body)["background"]:
        raise ClientError(
            "only background responses can be cancelled; leave the stream of any other", param="response_id"
        )
    return orjson.Fragment(body)


async def list_input_items(state: ServerState, scope: Scope, receive: Receive) -> dict[str, Any]:
    """Return one page of the items that a response answered."""
    response_id = scope["path_params"]["response_id"]
    page = ItemPage.read(scope)
    run = state.live_responses.find_running(response_id)
    if run is not None:
        return page.cut(run.new_items, response_id)
    items = await state.archive.find_input(response_id)
    if items is None:
        raise _not_found()
    return page.cut(items, response_id)


async def count_input_tokens(state: ServerState, scope: Scope, receive: Receive) -> dict[str, Any]:
    """Return how long the prompt of a response would be."""
    request, previous = await _read_request(state, scope, receive)
    run = new_run(state, request, Outlet(Unheard()), sse_frames)
    try:
        return {"object": "response.input_tokens", "input_tokens": await run.encode(previous)}
    finally:
        run.close()


async def refuse_compaction(scope: Scope, receive: Receive) -> Any:
    """Refuse by name: there is nothing here that could shorten a conversation without losing what was said."""
    raise ClientError("compaction is not supported by this server; send the items themselves", code="unsupported")


class TiedRun:
    """A run and the client that it ends with, for a server that stops."""

    def __init__(self, run: ResponseRun, transport: FrameTransport) -> None:
        self._run = run
        self._transport = transport

    def begin_drain(self) -> None:
        """Let it end."""

    def shut_down(self, error: AserveError) -> None:
        """End with ``error``; a client that does not read is cut off."""
        self._run.end(error)
        if not self._transport.is_writable:
            self._transport.abort()


class Unheard:
    """The transport of a response that is answered in one piece: its events go nowhere."""

    is_writable = True
    is_closed = False

    def write_frame(self, payload: bytes) -> None:
        """Drop it."""

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """Do nothing: it is always writable."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Do nothing: it is never closed."""

    def abort(self) -> None:
        """Do nothing: there is nothing to cut off."""


async def _read_request(
    state: ServerState, scope: Scope, receive: Receive
) -> tuple[ResponseRequest, KeptResponse | None]:
    """Return the checked body and what it continues."""
    body = await read_json(scope, receive, state.max_body_bytes)
    request = parse_create(await resolve_references(body, state.archive), state.engine.limits.vocab_size)
    state.check_model(request.model)
    if request.previous_response_id is None:
        return request, None
    previous = await state.archive.find_kept(request.previous_response_id)
    if previous is None:
        raise previous_not_found()
    return request, previous


async def _answer_whole(run: ResponseRun, outlet: Outlet, transport: FrameTransport, send: Send) -> None:
    outlet.open()
    run.open()
    await run.wait()
    if transport.is_closed:
        raise ClientGoneError
    if run.error is not None:
        raise run.error
    await send_json(send, run.events.snapshot())


async def _stream_log(state: ServerState, live: LiveResponse, start: int, scope: Scope, send: Send) -> None:
    """Answer with the events of ``live`` from number ``start`` on."""
    transport = transport_of(scope)
    live.log.check_start(start)
    outlet = Outlet(transport, KEEP_ALIVE)
    ended = asyncio.Event()
    reader = live.follow(outlet, start, ended.set)
    transport.on_close(ended.set)
    try:
        async with streamed_answer(state, outlet, send):
            outlet.open()
            await ended.wait()
    finally:
        live.leave(reader)


async def _find_body(state: ServerState, response_id: str) -> bytes:
    run = state.live_responses.find_running(response_id)
    if run is not None:
        return run.events.snapshot()
    stored = await state.archive.get(response_id)
    if stored is None:
        raise _not_found()
    return stored.body


def _not_found() -> NotFoundError:
    return NotFoundError("there is no such response", param="response_id", code="response_not_found")
