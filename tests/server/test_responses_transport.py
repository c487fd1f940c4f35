"""What clients may ask of the connection itself (protocol.md 1.1, 1.2, 1.4 and 1.6)."""

import asyncio
import json
from typing import Any

import pytest
from doubles_engine import until
from doubles_socket import (
    LIMITS,
    TERMINAL,
    Live,
    in_loop,
    kinds,
    receive,
    receive_until,
    respond,
    scripted_server,
    send,
    text_of,
)
from websockets.asyncio.client import connect

from aserve.config import ServerConfig


class Counting:
    """A transport that counts what is written to it."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._transport.write(data)


def count_writes(live: Live) -> Counting:
    (protocol,) = live.protocols
    protocol.transport = counting = Counting(protocol.transport)
    return counting


@in_loop
async def test_deflate_is_used_where_the_server_allows_it_and_the_client_offers_it() -> None:
    sizes = {}
    for is_allowed, compression in ((True, "deflate"), (True, None), (False, "deflate")):
        async with (
            scripted_server(ws_deflate=is_allowed) as live,
            connect(live.url, compression=compression, proxy=None, max_size=None) as socket,
        ):
            is_used = is_allowed and compression is not None
            assert bool(socket.protocol.extensions) is is_used
            counting = count_writes(live)
            events = await respond(socket, input="say " + "abcdefg " * 50)
            assert text_of(events) == "abcdefg " * 50
            pong = await socket.ping()
            assert text_of(await respond(socket, input="say \u00e9")) == "\u00e9"
            await asyncio.wait_for(pong, 10)
            sizes[is_used] = counting.num_bytes
            await live.become_idle()
    assert sizes[True] * 3 < sizes[False]


@in_loop
async def test_the_limit_of_a_frame_holds_for_what_it_unpacks_to() -> None:
    async with (
        scripted_server(ws_deflate=True, max_frame_mib=0.5) as live,
        connect(live.url, compression="deflate", proxy=None) as socket,
    ):
        await socket.send("x" * (1 << 19))
        assert (await receive(socket))["error"]["code"] == "invalid_json"
        await socket.send("x" * (1 << 24))  # 16 KiB on the wire
        await socket.wait_closed()
        assert socket.close_code == 1009


@in_loop
@pytest.mark.parametrize("beta", ["responses_websockets=2026-02-06", "responses_multi_agent=v1"])
async def test_what_clients_add_to_the_handshake_is_no_hindrance(beta: str) -> None:
    headers = {"OpenAI-Beta": beta, "session_id": "s", "x-codex-turn-metadata": "{}"}
    async with (
        scripted_server() as live,
        connect(f"{live.url}?model=some-model", additional_headers=headers, proxy=None) as socket,
    ):
        assert text_of(await respond(socket, input="say a", stream=True)) == "a"


def test_a_connection_lives_for_an_hour_unless_told_otherwise() -> None:
    assert ServerConfig().max_connection_age_s == 60 * 60
    assert ServerConfig().max_frame_mib == 16
    assert ServerConfig().ws_deflate is False


@in_loop
async def test_errors_that_pass_say_when_to_try_again() -> None:
    async with scripted_server() as live, live.connect() as socket:
        live.state.is_draining = True
        (error,) = await respond(socket, input="say a", stream_id="A")
        assert (error["status"], error["error"]["type"]) == (503, "service_unavailable_error")
        assert error["error"]["headers"] == {"retry-after": "5"}
        live.state.is_draining = False
        (error,) = await respond(socket, input=7)
        assert "headers" not in error["error"]


@in_loop
async def test_an_append_goes_on_with_the_settings_of_the_latest_response() -> None:
    settings = {"instructions": "be kind", "store": False, "metadata": {"a": "b"}, "max_output_tokens": 9}
    async with scripted_server() as live, live.connect() as socket:
        first = await respond(socket, input="say a", stream_id="A", **settings)
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say b"}]}
        fields = {"input": [item], "client_metadata": {"x": "y"}, "stream_id": "A"}
        await send(socket, "response.append", **fields)
        second = await receive_until(socket, *TERMINAL)
        assert (text_of(second), second[-1]["type"]) == ("b", "response.completed")
        response = second[-1]["response"]
        assert response["previous_response_id"] == first[-1]["response"]["id"]
        assert {name: response[name] for name in settings} == settings
        assert response["usage"]["input_tokens"] == len("be kind\nsay a\na\nsay b\n")
        (said,) = (await respond(socket, input="say d", stream_id="B"))[-1]["response"]["output"]
        item_of = {"type": "item_reference", "id": said["id"]}
        await send(socket, "response.append", input=[item_of, item], stream_id="A")
        third = (await receive_until(socket, *TERMINAL))[-1]["response"]
        assert third["usage"]["input_tokens"] == len("be kind\nsay a\na\nsay b\nb\nd\nsay b\n")
        await send(socket, "response.append", input=[], stream_id="A")
        (error,) = await receive_until(socket, *TERMINAL)
        assert (error["error"]["param"], error["stream_id"]) == ("input", "A")
        await send(socket, "response.append", input="say c")  # nothing to append to in this lane
        (error,) = await receive_until(socket, *TERMINAL)
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")


@in_loop
@pytest.mark.parametrize("how", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
async def test_an_append_behind_a_warm_up_is_answered(how: dict[str, Any]) -> None:
    settings = {"instructions": "be kind", "max_output_tokens": 2}
    async with scripted_server() as live, live.connect() as socket:
        warm = await respond(socket, input="say a", **settings, **how)
        assert warm[-1]["response"]["usage"]["output_tokens"] == 0
        for text in ("bcd", "efg"):
            await send(socket, "response.append", input=f"say {text}")
            events = await receive_until(socket, *TERMINAL)
            assert (text_of(events), events[-1]["type"]) == (text[:2], "response.incomplete")
            response = events[-1]["response"]
            assert {name: response[name] for name in settings} == settings
        assert response["usage"]["input_tokens"] == len("be kind\nsay a\nsay bcd\nbc\nsay efg\n")


@in_loop
async def test_appends_that_wait_go_on_from_one_another() -> None:
    async with scripted_server(step_time_s=0.001) as live, live.connect() as socket:
        await send(socket, input="say a")
        for word in "bc":
            await send(socket, "response.append", input=f"say {word}")
        turns = [await receive_until(socket, *TERMINAL) for _ in range(3)]
        assert [text_of(turn) for turn in turns] == ["a", "b", "c"]
        assert turns[2][-1]["response"]["usage"]["input_tokens"] == len("say a\na\nsay b\nb\nsay c\n")


@in_loop
@pytest.mark.parametrize("how", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
async def test_a_warm_up_computes_its_prompt_and_keeps_it_for_the_lane(how: dict[str, Any]) -> None:
    text = "say " + "a long text to warm up with " * 20
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input=text, store=False, **how)
        assert kinds(events) == ["response.created", "response.in_progress", "response.completed"]
        await until(lambda: not live.engine.stats().scheduler.num_in_flight)
        full_pages = len(f"{text}\n") // LIMITS.page_size
        assert live.engine.stats().scheduler.num_leased_pages in (full_pages - 1, full_pages)
        second = await respond(socket, input="say b", previous_response_id=events[0]["response"]["id"])
        assert text_of(second) == "b"
        cached = second[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= (full_pages - 1) * LIMITS.page_size


@in_loop
async def test_a_stored_response_is_found_again_when_a_failure_has_evicted_it() -> None:
    async with scripted_server() as live, live.connect() as socket:
        first = await respond(socket, input="say a", store=True)
        response_id = first[-1]["response"]["id"]
        (error,) = await respond(socket, input="say b", previous_response_id=response_id, model="no-such-model")
        assert (error["status"], error["error"]["code"]) == (404, "model_not_found")
        await until(lambda: not live.engine.stats().scheduler.num_leased_pages)
        second = await respond(socket, input="say b", previous_response_id=response_id)
        assert second[-1]["response"]["usage"]["input_tokens"] == len("say a\na\nsay b\n")


@in_loop
async def test_an_event_of_the_multi_agent_surface_is_refused_by_name() -> None:
    async with scripted_server() as live, live.connect() as socket:
        await socket.send(json.dumps({"type": "response.inject", "response_id": "resp_1", "input": "a"}))
        error = await receive(socket)
        assert (error["status"], error["error"]["code"]) == (400, "unknown_event_type")
        assert "response.inject" in error["error"]["message"]
