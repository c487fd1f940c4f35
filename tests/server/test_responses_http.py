"""The Responses API over HTTP with the official client (protocol.md 2.1)."""

import asyncio
import socket as sockets
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
from doubles_engine import until
from doubles_responses import create, official, plain, read_sse, take
from doubles_socket import MODEL, in_loop, kinds, obey, respond, scripted_server, text_of

from aserve.server.responses import query
from aserve.server.responses.item_ids import ItemPlace
from aserve.server.responses.items import Item
from aserve.server.responses.listing import wire_item

ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@in_loop
async def test_a_response_in_one_piece() -> None:
    async with scripted_server() as live, official(live) as client:
        answer = await client.responses.create(
            model=MODEL,
            input="say Hello",
            instructions="be kind",
            metadata={"a": "b"},
            temperature=0.5,
            top_p=0.25,
            max_output_tokens=50,
            user="u",
        )
        assert answer.output_text == "Hello"
        assert (answer.status, answer.model, answer.background, answer.to_dict()["store"]) == (
            "completed",
            MODEL,
            False,
            True,
        )
        assert (answer.instructions, answer.metadata, answer.temperature) == ("be kind", {"a": "b"}, 0.5)
        assert answer.usage is not None
        assert answer.usage.input_tokens == len("be kind\nsay Hello\n")
        assert answer.usage.output_tokens == len("Hello") + 1
        cut = await client.responses.create(model=MODEL, input="count", max_output_tokens=3)
        assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        await live.become_idle()


@in_loop
async def test_a_stream_is_that_of_the_socket() -> None:
    async with scripted_server() as live, official(live) as client, live.connect() as socket:
        stream = await client.responses.create(model=MODEL, input="say Dobrý", stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events if event.type != "response.output_text.delta"] == ORDER
        assert [event.sequence_number for event in events] == list(range(len(events)))
        over_socket = await respond(socket, input="say Dobrý", model=MODEL)
        assert kinds(over_socket) == [event.type for event in events]
        first, second = events[-1].to_dict()["response"], over_socket[-1]["response"]
        assert isinstance(first, dict)
        same = first.keys() - {"id", "created_at", "completed_at", "output", "usage"}
        assert {name: first[name] for name in same} == {name: second[name] for name in same}


@in_loop
async def test_frames_are_named_events_without_done() -> None:
    async with scripted_server() as live, plain(live) as client:
        answer = await create(client, "say a\x85b", stream=True)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = read_sse(answer.text)
        assert text_of(events) == "a\x85b"
        assert "[DONE]" not in answer.text


@in_loop
async def test_the_streaming_helper_accumulates_a_whole_response() -> None:
    async with scripted_server() as live, official(live) as client:
        async with client.responses.stream(model=MODEL, input="say Hello") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == "Hello"


@in_loop
async def test_turns_continue_by_id_over_http_and_from_socket_to_http_and_back() -> None:
    async with scripted_server() as live, official(live) as client, live.connect() as socket:
        first = await client.responses.create(model=MODEL, input="say a", instructions="not inherited")
        second = await respond(socket, input="say b", previous_response_id=first.id)
        second_id = second[-1]["response"]["id"]
        await socket.close()
        third = await client.responses.create(model=MODEL, input="say c", previous_response_id=second_id)
        assert third.usage is not None
        assert third.usage.input_tokens == len("say a\na\nsay b\nb\nsay c\n")
        assert third.previous_response_id == second_id
        assert (await client.responses.retrieve(second_id)).output_text == "b"
        with pytest.raises(openai.BadRequestError) as missing:
            await client.responses.create(model=MODEL, input="say c", previous_response_id="resp_none")
        assert missing.value.code == "previous_response_not_found"


@in_loop
async def test_retrieve_and_delete() -> None:
    async with scripted_server() as live, official(live) as client:
        answer = await client.responses.create(model=MODEL, input="say a")
        assert (await client.responses.retrieve(answer.id)).to_dict() == answer.to_dict()
        await client.responses.delete(answer.id)
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as missing:
                await ask(answer.id)
            assert missing.value.code == "response_not_found"


@in_loop
async def test_what_is_not_stored_is_not_found() -> None:
    async with scripted_server() as live, official(live) as client, live.connect() as socket:
        answer = await client.responses.create(model=MODEL, input="say a", store=False)
        assert answer.to_dict()["store"] is False
        over_socket = await respond(socket, input="say a", store=False)
        for response_id in (answer.id, over_socket[-1]["response"]["id"]):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(response_id)


HOSTILE = ("../../etc/passwd", "/etc/passwd", "%2e%2e/x", "x" * 4_000, "\0", "resp_\0", "resp_'; --", "..", " resp_1")


@in_loop
async def test_hostile_ids_are_keys_and_no_paths(tmp_path: Path) -> None:
    opened: list[str] = []
    is_watching = False

    def watch(event: str, arguments: Any) -> None:
        if is_watching and event in ("open", "os.listdir", "os.scandir", "sqlite3.connect"):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    store = f"sqlite:///{tmp_path / 'responses.db'}"
    async with scripted_server(response_store=store) as live, httpx.AsyncClient(base_url=live.http_url) as http:
        assert (await http.post("/v1/responses", json={"input": "say a"})).status_code == 200
        await http.get("/v1/responses/resp_unknown")
        is_watching = True
        for name in HOSTILE:
            path = f"/v1/responses/{quote(name, safe='')}"
            for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                answer = await http.request(method, path + suffix)
                assert answer.status_code in (400, 404, 405), (name, method)
                assert "passwd" not in answer.text
                assert "%2e" not in answer.text
            answer = await http.post("/v1/responses", json={"input": "say a", "previous_response_id": name})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")
            assert "passwd" not in answer.text
        is_watching = False
        assert opened == []


@in_loop
async def test_input_items_are_listed_in_pages() -> None:
    items: Any = [
        {"role": "user", "content": "one"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "thinking"}]},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "42"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "two", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "say three"}]},
    ]
    async with scripted_server() as live, official(live) as client:
        answer = await client.responses.create(model=MODEL, input=items)
        assert answer.output_text == "three"
        listed = await client.responses.input_items.list(answer.id, order="asc")
        assert [item.type for item in listed.data] == [
            "message",
            "reasoning",
            "function_call",
            "function_call_output",
            "message",
            "message",
        ]
        assert len({item.id for item in listed.data}) == 6
        paged = [item async for item in client.responses.input_items.list(answer.id, order="asc", limit=2)]
        assert [item.to_dict() for item in paged] == [item.to_dict() for item in listed.data]
        newest = await client.responses.input_items.list(answer.id, limit=1)
        assert newest.data[0].to_dict() == listed.data[-1].to_dict()
        assert newest.has_more is True
        for wrong in ({"limit": 0}, {"limit": 101}, {"after": "msg_none"}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.input_items.list(answer.id, **wrong)
            assert error.value.param == next(iter(wrong))


@in_loop
@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_page_is_made_of_its_own_items_only(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    action = {"type": "exec", "command": ["ls"]}
    shell = {"type": "local_shell_call", "id": "own_7", "call_id": "c", "action": action, "status": "completed"}
    items: Any = [{"role": "user", "content": "a"} for _ in range(200)] + [shell]
    items += [{"type": "local_shell_call_output", "id": "c", "output": "done"}]
    items += [{"role": "user", "content": "say b"}]
    made: list[int] = []

    def counted(item: Item, place: ItemPlace) -> dict[str, Any]:
        made.append(place.index)
        return wire_item(item, place)

    monkeypatch.setattr(query, "wire_item", counted)
    async with scripted_server() as live, plain(live) as client:
        path = f"/responses/{(await create(client, input=items)).json()['id']}/input_items"
        found: list[Any] = []
        page: dict[str, Any] = {"has_more": True}
        while page["has_more"]:
            after = {"after": page["last_id"]} if found else {}
            page = (await client.get(path, params={"order": order, "limit": "30", **after})).json()
            assert len(made) <= 33  # the page, and those that may have the id behind which it begins
            made.clear()
            found += page["data"]
            assert page["first_id"] == page["data"][0]["id"]
        texts = [item["content"][0]["text"] if "content" in item else item["type"] for item in found]
        expected = ["a"] * 200 + ["local_shell_call", "local_shell_call_output", "say b"]
        assert texts == (expected if order == "asc" else expected[::-1])
        behind = (await client.get(path, params={"order": order, "after": "own_7", "limit": "1"})).json()["data"][0]
        assert behind["type"] == ("local_shell_call_output" if order == "asc" else "message")
        for unknown in ("own_8", found[0]["id"].replace("_in", "_out"), found[0]["id"] + "9"):
            answer = await client.get(path, params={"after": unknown})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


@in_loop
async def test_a_background_response_is_queued_polled_and_finished() -> None:
    text, may_end = "say " + "a" * 40, threading.Event()

    def script(tokens: Sequence[int], position: int) -> int:
        assert position < len(text) + 20 or may_end.wait(20)
        return obey(tokens, position)

    async with scripted_server(script) as live, official(live) as client:
        answer = await client.responses.create(model=MODEL, input=text, background=True)
        assert (answer.status, answer.background, answer.output) == ("queued", True, [])
        seen = set()
        while (found := await client.responses.retrieve(answer.id)).status in ("queued", "in_progress"):
            seen.add(found.status)
            if found.status == "in_progress":
                may_end.set()
            await asyncio.sleep(0.01)
        assert "in_progress" in seen
        assert (found.status, found.output_text) == ("completed", "a" * 40)
        await live.become_idle()
        assert live.engine.stats().num_aborts == 0


@in_loop
async def test_a_response_that_is_not_stored_can_be_cancelled_while_it_runs() -> None:
    ask = {"input": "count", "stream": True, "resumable": True, "store": False}
    async with scripted_server(step_time_s=0.005) as live, plain(live) as client:
        async with client.stream("POST", "/responses", json=ask) as answer:
            first = await take(answer, 3)
            response_id = first[0]["response"]["id"]
            cancelled = await client.post(f"/responses/{response_id}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        assert (await client.get(f"/responses/{response_id}")).status_code == 404
        await live.become_idle()


@in_loop
async def test_a_background_response_can_be_cancelled_and_deleted() -> None:
    async with scripted_server(step_time_s=0.005) as live, official(live) as client:
        answer = await client.responses.create(model=MODEL, input="count", background=True)
        cancelled = await client.responses.cancel(answer.id)
        assert cancelled.status == "cancelled"
        assert (await client.responses.retrieve(answer.id)).status == "cancelled"
        assert (await client.responses.cancel(answer.id)).status == "cancelled"
        other = await client.responses.create(model=MODEL, input="count", background=True)
        await client.responses.delete(other.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(other.id)
        foreground = await client.responses.create(model=MODEL, input="say a")
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(foreground.id)
        await live.become_idle()


@in_loop
async def test_a_background_response_that_fails_says_so() -> None:
    async with scripted_server() as live, official(live) as client:
        answer = await client.responses.create(model=MODEL, input="fail", background=True)
        await live.become_idle()
        found = await client.responses.retrieve(answer.id)
        assert found.status == "failed"
        assert found.error is not None
        assert found.error.message == "this row cannot be sampled"


@in_loop
async def test_background_is_refused_where_it_cannot_work() -> None:
    async with scripted_server() as live, plain(live) as client, live.connect() as socket:
        wrong = await create(client, background=True, store=False)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "store")
        (error,) = await respond(socket, input="say a", background=True)
        assert error["error"]["param"] == "background"


@in_loop
async def test_what_is_wrong_is_told_before_a_stream_begins() -> None:
    async with scripted_server() as live, plain(live) as client:
        for fields, param in (
            ({"temperature": -1}, "temperature"),
            ({"input": "x" * 5000}, "input"),
            ({"conversation": "c"}, "conversation"),
            ({"model": "other"}, "model"),
            ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ):
            for how in ({"stream": True}, {}, {"background": True}, {"stream": True, "resumable": True}):
                answer = await create(client, **fields, **how)
                assert answer.status_code in (400, 404), (fields, how)
                assert answer.json()["error"]["param"] == param
        assert len(live.state.live_responses) == 0
        compact = await client.post("/responses/compact", json={"model": MODEL, "input": "a"})
        assert (compact.status_code, compact.json()["error"]["code"]) == (400, "unsupported")
        counted = await client.post("/responses/input_tokens", json={"model": MODEL, "input": "abc"})
        assert counted.json() == {"object": "response.input_tokens", "input_tokens": 4}


@in_loop
async def test_a_row_that_fails_fails_the_call_or_the_stream() -> None:
    async with scripted_server() as live, plain(live) as client:
        assert (await create(client, "fail")).status_code == 500
        events = read_sse((await create(client, "fail", stream=True)).text)
        assert events[-1]["type"] == "response.failed"
        assert (await create(client, "say fine")).json()["output"][0]["content"][0]["text"] == "fine"


def reset(answer: httpx.Response) -> None:
    """Have the connection closed with RST."""
    raw = answer.extensions["network_stream"].get_extra_info("socket")
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))


@in_loop
@pytest.mark.parametrize("num_events", [1, 3, 8])
async def test_a_lost_client_aborts_its_response_at_once(num_events: int) -> None:
    async with scripted_server(step_time_s=0.003) as live:
        for attempt in range(4):
            async with (
                plain(live) as client,
                client.stream("POST", "/responses", json={"input": "count", "stream": True}) as answer,
            ):
                await take(answer, num_events)
                if attempt % 2:
                    reset(answer)
        await live.lose_connections()
        await live.become_idle()
        assert live.engine.stats().num_aborts == 4
        assert len(live.state.live_responses) == 0


@in_loop
async def test_a_client_that_leaves_without_a_stream_aborts_too() -> None:
    async with scripted_server(step_time_s=0.003) as live, plain(live) as client:
        asking = asyncio.create_task(client.post("/responses", json={"input": "count"}))
        await until(lambda: live.engine.stats().num_open == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await live.lose_connections()
        await live.become_idle()
        assert live.engine.stats().num_aborts == 1
