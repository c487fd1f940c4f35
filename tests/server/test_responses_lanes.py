"""Continuation, order and parallelism on one socket (protocol.md 1.3 and 1.4)."""

import asyncio
from typing import Any

import pytest
from doubles_engine import until
from doubles_socket import (
    LIMITS,
    TERMINAL,
    in_loop,
    in_one_write,
    kinds,
    receive,
    receive_until,
    respond,
    scripted_server,
    send,
    text_of,
)
from websockets.asyncio.client import ClientConnection


def response_id(events: list[dict[str, Any]]) -> str:
    return events[-1]["response"]["id"]


def code(events: list[dict[str, Any]]) -> tuple[int, str]:
    assert kinds(events) == ["error"]
    return events[0]["status"], events[0]["error"]["code"]


NOT_FOUND = (400, "previous_response_not_found")


@in_loop
async def test_a_continuation_sees_the_whole_conversation_and_hits_the_prefix_cache() -> None:
    async with scripted_server() as live, live.connect() as socket:
        first = await respond(socket, input="say My name is Ada")
        second = await respond(socket, input="say Hello Ada", previous_response_id=response_id(first))
        await live.become_idle()  # a step that was launched ahead keeps the pages of the one that has ended
        third = await respond(socket, input="say Bye", previous_response_id=response_id(second))
    usage = third[-1]["response"]["usage"]
    history = "say My name is Ada\nMy name is Ada\nsay Hello Ada\nHello Ada\n"
    assert usage["input_tokens"] == len(history + "say Bye\n")
    # All but what follows the last full page of the previous turn's tokens comes from the cache.
    assert len(history) - 2 * LIMITS.page_size <= usage["input_tokens_details"]["cached_tokens"] <= len(history)
    assert third[-1]["response"]["previous_response_id"] == response_id(second)


@in_loop
async def test_instructions_are_not_inherited() -> None:
    async with scripted_server() as live, live.connect() as socket:
        first = await respond(socket, input="say a", instructions="be very brief")
        second = await respond(socket, input="say b", previous_response_id=response_id(first))
        third = await respond(socket, input="say c", instructions="be kind", previous_response_id=response_id(second))
    assert second[-1]["response"]["usage"]["input_tokens"] == len("say a\na\nsay b\n")
    assert second[-1]["response"]["instructions"] is None
    assert third[-1]["response"]["usage"]["input_tokens"] == len("be kind\nsay a\na\nsay b\nb\nsay c\n")


@in_loop
async def test_message_items_of_all_roles_and_parts_are_taken() -> None:
    items = [
        {"role": "developer", "content": "abc"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "de"}, {"type": "input_text", "text": "f"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "ghi", "annotations": []}],
        },
        {"role": "system", "content": None},
        {"role": "user", "content": "say ok"},
    ]
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input=items)
    assert events[-1]["response"]["usage"]["input_tokens"] == len("abc\ndef\nghi\n\nsay ok\n")


@in_loop
async def test_only_the_latest_response_of_a_lane_is_kept() -> None:
    async with scripted_server() as live, live.connect() as socket, live.connect() as other:
        first = await respond(socket, input="say a", store=False)
        second = await respond(socket, input="say b", store=False)
        assert code(await respond(other, input="say c", previous_response_id=response_id(second))) == NOT_FOUND
        events = await respond(socket, input="say c", previous_response_id=response_id(first))
        assert code(events) == NOT_FOUND
        assert events[0]["error"]["param"] == "previous_response_id"
        assert events[0]["error"]["type"] == "invalid_request_error"
        assert text_of(await respond(socket, input="say c", previous_response_id=response_id(second))) == "c"


@in_loop
@pytest.mark.parametrize("failing", [{"input": "say b", "temperature": -1}, {"input": "fail"}, {"input": "x" * 5000}])
async def test_a_failed_continuation_evicts_what_it_continued(failing: dict[str, Any]) -> None:
    async with scripted_server() as live, live.connect() as socket:
        first = await respond(socket, input="say a", store=False)
        failed = await respond(socket, **failing, previous_response_id=response_id(first))
        assert failed[-1]["type"] in ("error", "response.failed")
        assert code(await respond(socket, input="say c", previous_response_id=response_id(first))) == NOT_FOUND


@in_loop
async def test_an_unrelated_failure_evicts_nothing() -> None:
    async with scripted_server() as live, live.connect() as socket:
        first = await respond(socket, input="say a")
        assert (await respond(socket, input="say b", top_p=7))[-1]["type"] == "error"
        assert (await respond(socket, input="fail"))[-1]["type"] == "response.failed"
        assert text_of(await respond(socket, input="say c", previous_response_id=response_id(first))) == "c"


@in_loop
async def test_a_fork_continues_another_lane_and_its_failure_keeps_the_parent() -> None:
    async with scripted_server() as live, live.connect() as socket:
        first = await respond(socket, input="say a", stream_id="main")
        failed = await respond(socket, input="fail", previous_response_id=response_id(first), stream_id="fork")
        assert failed[-1]["type"] == "response.failed"
        fork = await respond(socket, input="say b", previous_response_id=response_id(first), stream_id="fork")
        assert fork[-1]["response"]["usage"]["input_tokens"] == len("say a\na\nsay b\n")
        main = await respond(socket, input="say c", previous_response_id=response_id(first), stream_id="main")
        assert main[-1]["response"]["usage"]["input_tokens"] == len("say a\na\nsay c\n")


@in_loop
async def test_a_lane_runs_its_creates_in_order_without_overlap() -> None:
    async with scripted_server(step_time_s=0.001) as live, live.connect() as socket:
        for word in ("one", "two", "three"):
            await send(socket, input=f"say {word}")
        turns = [await receive_until(socket, *TERMINAL) for _ in range(3)]
    assert [text_of(turn) for turn in turns] == ["one", "two", "three"]
    assert all(
        {event.get("response", {"id": None})["id"] for event in turn} <= {None, response_id(turn)} for turn in turns
    )
    assert all([event["sequence_number"] for event in turn] == list(range(len(turn))) for turn in turns)


@in_loop
async def test_a_queued_create_may_continue_the_response_before_it() -> None:
    async with scripted_server(step_time_s=0.001) as live, live.connect() as socket:
        await send(socket, input="say slowly")
        created = await receive(socket)
        await send(socket, input="say next", previous_response_id=created["response"]["id"])
        await receive_until(socket, *TERMINAL)
        second = await receive_until(socket, *TERMINAL)
    assert second[-1]["response"]["usage"]["input_tokens"] == len("say slowly\nslowly\nsay next\n")


@in_loop
async def test_lanes_run_side_by_side_and_every_event_names_its_lane() -> None:
    async with scripted_server(step_time_s=0.001) as live, live.connect() as socket:
        await send(socket, input="say " + "a" * 40, stream_id="A")
        await send(socket, input="say " + "b" * 40, stream_id="B")
        await send(socket, input="say " + "c" * 40)
        events: list[dict[str, Any]] = []
        while sum(event["type"] in TERMINAL for event in events) < 3:
            events.append(await receive(socket))
    lanes = [event.get("stream_id") for event in events]
    assert set(lanes) == {"A", "B", None}
    assert all("stream_id" not in event for event in events if event.get("stream_id") is None)
    for name in ("A", "B", None):
        own = [event for event in events if event.get("stream_id") == name]
        assert text_of(own) == (name or "c").lower() * 40
        assert [event["sequence_number"] for event in own] == list(range(len(own)))
    ends = [place for place, event in enumerate(events) if event["type"] in TERMINAL]
    starts = [place for place, event in enumerate(events) if event["type"] == "response.created"]
    assert max(starts) < min(ends), "a lane waited for another"


@in_loop
async def test_errors_of_a_named_lane_name_it() -> None:
    async with scripted_server() as live, live.connect() as socket:
        (error,) = await respond(socket, input="say a", stream_id="A", temperature="hot")
    assert error["stream_id"] == "A"


@in_loop
@pytest.mark.parametrize("stream_id", ["", "a b", "x" * 257, "é", 7, ["a"]])
async def test_a_bad_stream_id_is_refused(stream_id: object) -> None:
    async with scripted_server() as live, live.connect() as socket:
        assert code(await respond(socket, input="say a", stream_id=stream_id)) == (400, "invalid_stream_id")
        assert text_of(await respond(socket, input="say a", stream_id=None)) == "a"
        assert text_of(await respond(socket, input="say a", stream_id="x" * 256)) == "a"


@in_loop
async def test_a_socket_has_at_most_32_named_lanes_beside_the_default_one() -> None:
    async with scripted_server() as live, live.connect() as socket:
        for number in range(32):
            assert text_of(await respond(socket, input="say a", stream_id=f"lane-{number}")) == "a"
        refused = await respond(socket, input="say a", stream_id="one-more")
        assert code(refused) == (400, "websocket_stream_limit_reached")
        assert refused[0]["error"]["param"] == "stream_id"
        assert text_of(await respond(socket, input="say a", stream_id="lane-0")) == "a"
        assert text_of(await respond(socket, input="say a")) == "a"


@in_loop
async def test_at_most_16_responses_run_at_once_on_a_socket() -> None:
    async with scripted_server(step_time_s=0.005) as live, live.connect() as socket:
        for number in range(20):
            await send(socket, input="count", stream_id=f"lane-{number}")
        running = set()
        async with asyncio.timeout(5):
            while len(running) < 16:
                running.add((await receive(socket))["stream_id"])
        running |= {(await receive(socket))["stream_id"] for _ in range(200)}
        assert len(running) == 16
        assert live.engine.stats().num_open == 16
        await send(socket, "response.cancel", stream_id=min(running))
        async with asyncio.timeout(5):
            while len(running) == 16:
                running.add((await receive(socket))["stream_id"])


@in_loop
async def test_creates_that_wait_are_bounded_in_number_and_bytes() -> None:
    async with scripted_server(step_time_s=0.01, max_frame_mib=0.01) as live, live.connect() as socket:
        await send(socket, input="count")
        await receive_until(socket, "response.created")
        for _ in range(64):
            await send(socket, input="say a")
        await send(socket, input="say b")
        refused = (await receive_until(socket, "error"))[-1]
        assert (refused["status"], refused["error"]["type"]) == (429, "rate_limit_error")
        await send(socket, "response.cancel")
        for _ in range(64):
            await receive_until(socket, "response.completed")
        await send(socket, input="count")
        await receive_until(socket, "response.created")
        for _ in range(3):
            await send(socket, input="say a", user="u" * 9000)
        assert (await receive_until(socket, "error"))[-1]["status"] == 429


async def warm_up(socket: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    events = await respond(socket, **fields)
    assert kinds(events) == ["response.created", "response.in_progress", "response.completed"]
    assert events[-1]["response"]["output"] == []
    assert events[-1]["response"]["usage"]["output_tokens"] == 0
    return events


@in_loop
@pytest.mark.parametrize("how", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
async def test_a_warm_up_prefills_and_can_be_continued(how: dict[str, Any]) -> None:
    text = "say this is a long text to warm up with"
    async with scripted_server() as live, live.connect() as socket:
        first = await warm_up(socket, input=text, **how)
        second = await respond(socket, input="say done", previous_response_id=response_id(first))
        usage = second[-1]["response"]["usage"]
        assert usage["input_tokens"] == len(f"{text}\nsay done\n")
        assert usage["input_tokens_details"]["cached_tokens"] >= len(text) - LIMITS.page_size
        await warm_up(socket, instructions="only these", **how)


@in_loop
async def test_cancel_ends_the_running_response_with_what_there_is() -> None:
    async with scripted_server(step_time_s=0.002) as live, live.connect() as socket:
        await send(socket, input="count")
        await receive_until(socket, "response.output_text.delta")
        await send(socket, input="say next")
        await send(socket, "response.cancel")
        events = await receive_until(socket, *TERMINAL)
        response = events[-1]["response"]
        assert (events[-1]["type"], response["status"]) == ("response.incomplete", "cancelled")
        assert response["incomplete_details"] is None
        assert response["output"][0]["status"] == "incomplete"
        assert kinds(events)[-4:-1] == ORDER_OF_END
        assert response["usage"]["output_tokens"] >= len(response["output"][0]["content"][0]["text"]) > 0
        assert text_of(await receive_until(socket, *TERMINAL)) == "next"
        await live.become_idle()


ORDER_OF_END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@in_loop
async def test_a_cancelled_response_can_be_continued() -> None:
    async with scripted_server(step_time_s=0.002) as live, live.connect() as socket:
        await send(socket, input="count")
        created = (await receive_until(socket, "response.output_text.delta"))[0]["response"]["id"]
        await send(socket, "response.cancel", response_id=created)
        partial = (await receive_until(socket, *TERMINAL))[-1]["response"]["output"][0]["content"][0]["text"]
        second = await respond(socket, input="say more", previous_response_id=created)
        assert second[-1]["response"]["usage"]["input_tokens"] == len(f"count\n{partial}\nsay more\n")


@in_loop
async def test_cancel_before_the_first_token_still_gives_a_whole_response() -> None:
    async with scripted_server(step_time_s=None) as live, live.connect() as socket:
        await send(socket, input="count")
        await receive_until(socket, "response.in_progress")
        await send(socket, "response.cancel")
        await send(socket, "response.cancel")
        events = await receive_until(socket, *TERMINAL)
        assert kinds(events) == ["response.incomplete"]
        assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("cancelled", [])
        runner = live.engine._parts.runner
        while runner.launched:
            runner.complete_next()
        await live.become_idle()


@in_loop
@pytest.mark.parametrize("stream_id", [None, "A"])
async def test_a_cancel_in_one_segment_with_its_create_is_not_lost(stream_id: str | None) -> None:
    async with scripted_server(step_time_s=0.002) as live, live.connect() as socket:
        create = {"type": "response.create", "input": "count", "stream_id": stream_id}
        in_one_write(socket, create, {"type": "response.cancel", "stream_id": stream_id})
        async with asyncio.timeout(5):
            events = await receive_until(socket, *TERMINAL)
        assert kinds(events) == ["response.created", "response.in_progress", "response.incomplete"]
        assert (events[-1]["response"]["status"], events[-1]["response"]["output"]) == ("cancelled", [])
        assert text_of(await respond(socket, input="say next", stream_id=stream_id)) == "next"
        await live.become_idle()


@in_loop
async def test_a_cancel_while_its_create_waits_for_a_slot_is_not_lost() -> None:
    async with scripted_server(step_time_s=0.005) as live, live.connect() as socket:
        for number in range(16):
            await send(socket, input="count", stream_id=f"lane-{number}")
        await until(lambda: live.engine.stats().num_open == 16)
        await send(socket, input="count", stream_id="late")
        await send(socket, "response.cancel", stream_id="late")
        await send(socket, input="say next", stream_id="late")
        for number in range(16):
            await send(socket, "response.cancel", stream_id=f"lane-{number}")
        late: list[dict[str, Any]] = []
        async with asyncio.timeout(5):
            while not late or late[-1]["type"] != "response.completed":
                event = await receive(socket)
                if event["stream_id"] == "late":
                    late.append(event)
        assert [event["response"]["status"] for event in late if event["type"] in TERMINAL] == [
            "cancelled",
            "completed",
        ]
        assert text_of(late) == "next"


@in_loop
async def test_cancel_of_nothing_is_harmless_and_of_an_unknown_response_an_error() -> None:
    async with scripted_server() as live, live.connect() as socket:
        await send(socket, "response.cancel")
        await send(socket, "response.cancel", stream_id="never-used")
        events = await respond(socket, input="say a")
        assert text_of(events) == "a"
        await send(socket, "response.cancel", response_id=response_id(events))
        await send(socket, "response.cancel", response_id="resp_unknown")
        error = await receive(socket)
        assert (error["status"], error["error"]["code"]) == (404, "response_not_found")
