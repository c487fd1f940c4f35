"""``response.steer`` for a response that calls tools: the order of events is that of the SDK's descriptions."""

from typing import Any

import pytest
from doubles_responses import plain
from doubles_socket import (
    TERMINAL,
    in_loop,
    kinds,
    receive,
    receive_until,
    respond,
    scripted_server,
    send,
    text_of,
)
from websockets.asyncio.client import ClientConnection

TOOLS: list[dict[str, Any]] = [{"type": "function", "name": "f"}, {"type": "custom", "name": "run"}]
CALLS = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "run", "arguments": {"input": "'
ACCEPTED, PENDING, FAILED = (f"response.steer.{kind}" for kind in ("accepted", "pending", "failed"))


async def steer_a_caller(
    socket: ClientConnection, texts: list[str], when: str = "response.output_item.added", **fields: Any
) -> list[dict[str, Any]]:
    """Steer a response that calls two tools, and return its events up to the last that says what is pending."""
    await send(socket, input=f'say {CALLS}{"x" * 200}"}}}}</tool_call>', tools=TOOLS, **fields)
    events = await receive_until(socket, when)
    for text in texts:
        await send(socket, "response.steer", previous_response_id=events[0]["response"]["id"], input=text)
    while kinds(events).count(PENDING) < len(texts):
        events.append(await receive(socket))
    return events


def results_for(pending: dict[str, Any], last: str) -> list[dict[str, Any]]:
    """Fill the stubs as a client does."""
    stubs = pending["required_input"]
    return [{**stub, "output": last if stub is stubs[-1] else "one"} for stub in stubs]


@in_loop
@pytest.mark.parametrize("stream_id", [None, "A"])
@pytest.mark.parametrize("resumable", [False, True])
async def test_input_waits_for_the_results_of_calls_and_joins_them(stream_id: str | None, resumable: bool) -> None:
    lane = {} if stream_id is None else {"stream_id": stream_id}
    async with scripted_server(step_time_s=0.002) as live, live.connect() as socket, plain(live) as client:
        first = await steer_a_caller(socket, ["first", "second"], **lane, resumable=resumable)
        assert [kind for kind in kinds(first) if kind in (ACCEPTED, PENDING, *TERMINAL)] == [
            ACCEPTED, ACCEPTED, "response.completed", PENDING, PENDING,
        ]  # fmt: skip
        assert [event["sequence_number"] for event in first] == list(range(len(first)))
        assert {event.get("stream_id") for event in first} == {stream_id}
        parent = next(event["response"] for event in first if event["type"] == "response.completed")
        one, two = [event for event in first if event["type"] == PENDING]
        assert one["reason"] == "waiting_for_required_input"
        call, custom = parent["output"]
        assert (
            one["required_input"]
            == two["required_input"]
            == [
                {"type": "function_call_output", "call_id": call["call_id"], "name": "f"},
                {"type": "custom_tool_call_output", "call_id": custom["call_id"]},
            ]
        )
        accepted = [event["steer"] for event in first if event["type"] == ACCEPTED]
        assert [one["steer"], two["steer"]] == accepted

        await send(socket, "response.steer", previous_response_id=parent["id"], input="say joined")
        late = [await receive(socket), await receive(socket)]
        assert kinds(late) == [ACCEPTED, PENDING]
        assert [event["sequence_number"] for event in late] == [len(first), len(first) + 1]
        ask = {"input": results_for(one, "two"), "previous_response_id": parent["id"], **lane}
        second = await respond(socket, **ask, temperature=0.5)
        assert text_of(second) == "joined"
        assert second[0]["response"]["temperature"] == 0.5
        listed = (await client.get(f"/responses/{second[0]['response']['id']}/input_items?order=asc")).json()["data"]
        said = [item.get("output") or item["content"][0]["text"] for item in listed]
        assert said == ["one", "two", "first", "second", "say joined"]
        third = await respond(socket, input="say on", previous_response_id=second[0]["response"]["id"], **lane)
        assert text_of(third) == "on"
        await live.become_idle()


@in_loop
async def test_a_lane_that_goes_on_without_the_results_hands_the_input_back() -> None:
    async with scripted_server(step_time_s=0.002) as live, live.connect() as socket:
        first = await steer_a_caller(socket, ["a", "b"])
        await send(socket, input="say else")
        events = await receive_until(socket, "response.completed")
        failed = [event for event in events if event["type"] == FAILED]
        assert [(event["error"]["code"], event["steer"]["input"]) for event in failed] == [
            ("successor_creation_failed", "a"),
            ("successor_creation_failed", "b"),
        ]
        assert [event["sequence_number"] for event in failed] == [len(first), len(first) + 1]
        assert [event["steer"]["id"] for event in failed] == [e["steer"]["id"] for e in first if e["type"] == ACCEPTED]
        assert text_of(events) == "else"


@in_loop
async def test_a_continuation_that_fails_before_it_begins_leaves_the_input_waiting() -> None:
    async with scripted_server(step_time_s=0.002) as live, live.connect() as socket:
        first = await steer_a_caller(socket, ["say joined"])
        parent = next(event["response"]["id"] for event in first if event["type"] == "response.completed")
        ask = {"input": results_for(first[-1], "two"), "previous_response_id": parent}
        (error,) = await respond(socket, **ask, temperature=-1)
        assert (error["type"], error["error"]["param"]) == ("error", "temperature")
        fork = await respond(socket, **ask, stream_id="B", max_output_tokens=1)
        joined = await respond(socket, **ask)
        assert text_of(joined) == "joined"
        lengths = [events[-1]["response"]["usage"]["input_tokens"] for events in (fork, joined)]
        assert lengths[1] - lengths[0] == len("say joined\n")


@in_loop
async def test_text_before_a_call_can_be_steered_at_once() -> None:
    async with scripted_server(step_time_s=0.002) as live, live.connect() as socket:
        await send(socket, input="say " + "Let me see. " * 20 + CALLS, tools=TOOLS)
        events = await receive_until(socket, "response.output_text.delta")
        await send(socket, "response.steer", previous_response_id=events[0]["response"]["id"], input="say Yes")
        events += await receive_until(socket, *TERMINAL)
        assert events[-1]["response"]["incomplete_details"] == {"reason": "steered"}
        second = await receive_until(socket, *TERMINAL)
        assert text_of(second) == "Yes"
        assert second[0]["response"]["tools"] == TOOLS


@in_loop
async def test_as_many_may_wait_as_for_a_successor() -> None:
    async with scripted_server(step_time_s=0.002) as live, live.connect() as socket:
        first = await steer_a_caller(socket, ["a"])
        for _ in range(15):
            await send(socket, "response.steer", previous_response_id=first[0]["response"]["id"], input="a")
            assert kinds([await receive(socket), await receive(socket)]) == [ACCEPTED, PENDING]
        await send(socket, "response.steer", previous_response_id=first[0]["response"]["id"], input="a")
        refused = await receive(socket)
        assert (refused["type"], refused["error"]["code"]) == (FAILED, "too_many_pending_steers")
