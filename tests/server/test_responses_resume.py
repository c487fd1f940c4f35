"""Responses that outlive their client: read again from any event, generated once, and gone after the grace period."""

import asyncio
import json
import random
import time
from typing import Any

import httpx
import pytest
from doubles_engine import until
from doubles_responses import create, official, plain, read_sse, take
from doubles_slow_peer import say, slow_peer
from doubles_socket import (
    MODEL,
    TERMINAL,
    Live,
    check_event,
    in_loop,
    in_one_write,
    kinds,
    receive_until,
    respond,
    scripted_engine,
    scripted_server,
    send,
    text_of,
)

from aserve.server.responses import event_log
from aserve.server.responses import live as live_responses
from aserve.server.responses.items import MessageItem
from aserve.server.stream_sink import Outlet

RESUMABLE = {"input": "say " + "abcdefghij" * 12, "stream": True, "resumable": True}
SPOKEN = "abcdefghij" * 12


async def read_from(client: httpx.AsyncClient, response_id: str, after: int | None) -> list[dict[str, Any]]:
    query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    answer = await client.get(f"/responses/{response_id}", params=query)
    assert answer.status_code == 200, answer.text
    return read_sse(answer.text)


@in_loop
@pytest.mark.parametrize("background", [False, True])
async def test_a_lost_client_goes_on_where_it_was(background: bool) -> None:
    ask = {**RESUMABLE, "background": background, "resumable": not background}
    async with scripted_server(step_time_s=0.003) as live, plain(live) as client:
        async with plain(live) as lost, lost.stream("POST", "/responses", json=ask) as answer:
            first = await take(answer, 9)
        response_id = first[0]["response"]["id"]
        rest = await read_from(client, response_id, first[-1]["sequence_number"])
        events = first + rest
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        assert text_of(events) == SPOKEN
        again = await read_from(client, response_id, None)
        assert again == events
        assert (await client.get(f"/responses/{response_id}")).json() == events[-1]["response"]
        stats = live.engine.stats()
        assert (stats.num_aborts, live.engine.metrics.num_generation_tokens) == (0, len(SPOKEN) + 1)
        await live.become_idle()


@in_loop
async def test_the_official_client_resumes_a_background_stream() -> None:
    async with scripted_server(step_time_s=0.003) as live, official(live) as client:
        stream = await client.responses.create(model=MODEL, input=RESUMABLE["input"], background=True, stream=True)
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 10:
                break
        await stream.close()
        rest = await client.responses.retrieve(
            seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
        )
        seen += [event async for event in rest]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert seen[-1].response.output_text == SPOKEN


@in_loop
async def test_without_its_client_a_resumable_response_ends_after_the_grace_period() -> None:
    async with scripted_server(step_time_s=0.003, resume_grace_s=1.0) as live, plain(live) as client:
        async with (
            plain(live) as lost,
            lost.stream("POST", "/responses", json={**RESUMABLE, "input": "count"}) as answer,
        ):
            (created, *_) = await take(answer, 5)
        await asyncio.sleep(0.05)
        assert live.engine.stats().num_open == 1
        await until(lambda: not live.engine.stats().num_open)
        await live.become_idle()
        found = await client.get(f"/responses/{created['response']['id']}")
        assert found.json()["status"] == "cancelled"
        await asyncio.sleep(1.1)
        gone = await client.get(f"/responses/{created['response']['id']}", params={"stream": "true"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (400, "events_gone")


@in_loop
async def test_two_readers_get_the_same_and_a_bad_place_is_refused() -> None:
    async with scripted_server(step_time_s=0.003) as live, plain(live) as client:
        created = (await create(client, RESUMABLE["input"], background=True)).json()
        both = await asyncio.gather(*(read_from(client, created["id"], None) for _ in range(2)))
        assert both[0] == both[1]
        assert text_of(both[0]) == SPOKEN
        for query, param in (
            ({"stream": "true", "starting_after": "99999"}, "starting_after"),
            ({"stream": "true", "starting_after": "-1"}, "starting_after"),
            ({"starting_after": "1"}, "starting_after"),
            ({"stream": "perhaps"}, "stream"),
        ):
            wrong = await client.get(f"/responses/{created['id']}", params=query)
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)
        missing = await client.get("/responses/resp_none", params={"stream": "true"})
        assert missing.status_code == 404


@in_loop
async def test_a_log_keeps_the_newest_events_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_LOG_BYTES", 6000)
    async with scripted_server() as live, plain(live) as client:
        created = (await create(client, RESUMABLE["input"], background=True)).json()
        await live.become_idle()
        log = live.state.live_responses.find(created["id"])
        assert log is not None
        assert log.log.first > 0
        old = await client.get(f"/responses/{created['id']}", params={"stream": "true"})
        assert (old.status_code, old.json()["error"]["code"]) == (400, "events_gone")
        newest = await read_from(client, created["id"], log.log.end - 3)
        assert [event["type"] for event in newest] == ["response.output_item.done", "response.completed"]


class Reading:
    """A transport whose peer always keeps up."""

    is_writable = True
    is_closed = False

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write_frame(self, payload: bytes) -> None:
        self.frames.append(payload)

    def on_writable(self, callback: Any) -> None:
        pass


def test_a_new_event_costs_its_reader_as_little_behind_many_as_behind_few() -> None:
    log, peer = event_log.EventLog(), Reading()
    outlet = Outlet(peer)  # type: ignore[arg-type]
    outlet.open()
    event_log.LogReader(log, outlet, 0, lambda: None, lambda frame: frame)
    costs = []
    for start in range(0, 40_000, 2_000):
        began = time.thread_time()
        for number in range(start, start + 2_000):
            log.write_frame(b"%d" % number)
        costs.append(time.thread_time() - began)
    assert peer.frames == [b"%d" % number for number in range(40_000)]
    assert min(costs[-3:]) < 10 * min(costs[:3])


@in_loop
async def test_what_a_client_is_cut_off_from_is_stored_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_LOG_BYTES", 3000)
    async with scripted_engine(step_time_s=0.002) as engine, slow_peer(engine) as (session, peer):
        await say(session, input=f"say {SPOKEN}", resumable=True)
        await until(lambda: "response.output_text.delta" in kinds(peer.events))
        peer.is_writable = False
        await until(lambda: engine.metrics.num_generation_tokens > 60)
        peer.read()
        assert peer.is_closed
        await until(lambda: not engine.stats().num_open)
        kept = await session.state.archive.find_kept(peer.events[0]["response"]["id"])
    assert kept is not None
    assert kept.items == [MessageItem("user", f"say {SPOKEN}"), MessageItem("assistant", SPOKEN)]


@in_loop
async def test_a_socket_resumes_what_another_socket_or_http_began() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        async with live.connect() as lost:
            await send(lost, **{**RESUMABLE, "stream_id": "one"})
            first = await receive_until(lost, "response.output_text.delta")
            assert {event["stream_id"] for event in first} == {"one"}
        after = first[-1]["sequence_number"]
        response_id = first[0]["response"]["id"]
        await send(socket, "response.resume", response_id=response_id, starting_after=after, stream_id="two")
        rest = await receive_until(socket, *TERMINAL)
        assert {event["stream_id"] for event in rest} == {"two"}
        assert [event["sequence_number"] for event in rest] == list(range(after + 1, after + 1 + len(rest)))
        assert text_of(first) + text_of(rest) == SPOKEN
        assert text_of(await respond(socket, input="say more", previous_response_id=response_id)) == "more"
        await send(socket, "response.resume", response_id="resp_none")
        (error,) = await receive_until(socket, "error")
        assert (error["status"], error["error"]["code"]) == (404, "response_not_found")
        await send(socket, "response.resume", response_id=response_id, starting_after=10**6)
        (error,) = await receive_until(socket, "error")
        assert error["error"]["param"] == "starting_after"


@in_loop
async def test_what_ended_without_its_client_is_continued_where_it_is_resumed() -> None:
    async with scripted_server() as live, live.connect() as socket:
        async with live.connect() as lost:
            await send(lost, **RESUMABLE, store=False, instructions="be kind")
            first = await receive_until(lost, "response.created")
        await live.become_idle()
        response_id = first[0]["response"]["id"]
        await send(socket, "response.resume", response_id=response_id, starting_after=0)
        assert text_of(await receive_until(socket, *TERMINAL)) == SPOKEN
        second = await respond(socket, input="say more", previous_response_id=response_id, store=False)
        assert text_of(second) == "more"
        history = f"{RESUMABLE['input']}\n{SPOKEN}\n"
        assert second[-1]["response"]["usage"]["input_tokens"] == len(f"{history}say more\n")
        await send(socket, "response.resume", response_id=response_id, starting_after=0)
        await receive_until(socket, *TERMINAL)
        await send(socket, "response.append", input="say less")
        third = (await receive_until(socket, *TERMINAL))[-1]["response"]
        assert (third["instructions"], third["store"]) == ("be kind", False)
        assert third["usage"]["input_tokens"] == len(f"be kind\n{history}say less\n")


@in_loop
@pytest.mark.parametrize("is_named", [False, True])
async def test_a_cancel_while_a_resume_waits_for_its_turn_is_not_lost(is_named: bool) -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        async with live.connect() as lost:
            await send(lost, input="count", resumable=True)
            first = await receive_until(lost, "response.output_text.delta")
            response_id = first[0]["response"]["id"]
        resume = {"type": "response.resume", "response_id": response_id}
        cancel = {"type": "response.cancel", **({"response_id": response_id} if is_named else {})}
        in_one_write(socket, resume, cancel)
        async with asyncio.timeout(5):
            events = await receive_until(socket, *TERMINAL)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["status"] == "cancelled"
        assert text_of(await respond(socket, input="say next")) == "next"
        await live.become_idle()


@in_loop
async def test_a_place_that_is_refused_leaves_the_numbers_of_the_response_as_they_are() -> None:
    async with scripted_server(step_time_s=0.01) as live, live.connect() as socket, live.connect() as other:
        await send(socket, **RESUMABLE)
        events = await receive_until(socket, "response.output_text.delta")
        response_id = events[0]["response"]["id"]
        for message in ({"starting_after": 10**6}, {"starting_after": 0}):
            await send(other, "response.resume", response_id=response_id, **message)
        (error,) = await receive_until(other, "error")
        assert error["error"]["param"] == "starting_after"
        events += await receive_until(socket, *TERMINAL)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert await receive_until(other, *TERMINAL) == events[1:]


@in_loop
@pytest.mark.parametrize("kind", ["resumable", "background", "socket"])
async def test_a_response_whose_opening_events_are_large_is_served_and_resumed(kind: str) -> None:
    tools = [{"type": "function", "name": "f", "description": "x" * (9 << 20)}]  # in each event with the response
    ask = {"input": "say " + "a" * 300, "tools": tools, "stream": True}
    async with scripted_server(tool_call_parser="none") as live, plain(live) as client:
        if kind == "socket":
            async with live.connect() as socket:
                events = await respond(socket, **ask, resumable=True)
        else:
            answer = await client.post("/responses", json={**ask, kind: True})
            assert answer.status_code == 200, answer.text[:200]
            events = read_sse(answer.text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (text_of(events), events[-1]["type"]) == ("a" * 300, "response.completed")
        assert await read_from(client, events[0]["response"]["id"], None) == events
        await live.become_idle()


@in_loop
async def test_the_events_of_ended_responses_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_responses, "MAX_ENDED_BYTES", 60_000)
    async with scripted_server() as live, plain(live) as client:
        ids = [(await create(client, "say " + "a" * 100, background=True)).json()["id"] for _ in range(6)]
        await live.become_idle()
        answers = [await client.get(f"/responses/{one}", params={"stream": "true"}) for one in ids]
        states = [answer.status_code for answer in answers]
        assert states == sorted(states, reverse=True)
        kept = [len(answer.content) for answer in answers if answer.status_code == 200]
        assert 1 <= len(kept) < 6
        assert sum(kept) <= 60_000
        large = (await create(client, "say " + "a" * 600, background=True)).json()["id"]
        await live.become_idle()
        assert text_of(await read_from(client, large, None)) == "a" * 600  # alone it may be larger than the bound


@in_loop
async def test_deleting_a_response_ends_those_who_read_it() -> None:
    async with scripted_server(step_time_s=0.01) as live, plain(live) as client, live.connect() as socket:
        await send(socket, **{**RESUMABLE, "input": "count"})
        events = await receive_until(socket, "response.output_text.delta")
        response_id = events[0]["response"]["id"]
        reading = asyncio.create_task(read_from(client, response_id, None))
        await until(lambda: len(live.state.live_responses.find(response_id).log._readers) == 2)  # type: ignore[union-attr]
        assert (await client.delete(f"/responses/{response_id}")).status_code == 200
        events += await receive_until(socket, *TERMINAL)
        assert events[-1]["response"]["status"] == "cancelled"
        async with asyncio.timeout(10):
            assert await reading == events
            assert text_of(await respond(socket, input="say more")) == "more"
        await live.become_idle()


async def wander(live: Live, seed: int) -> None:
    """Begin one response in some way, perhaps leave it, perhaps come back."""
    dice = random.Random(seed)
    kind = dice.choice([{}, {"background": True}, {"resumable": True}])
    ask = {"input": f"say {'xyz' * dice.randrange(1, 40)}", "stream": True, **kind}
    async with plain(live) as client, client.stream("POST", "/responses", json=ask) as answer:
        if dice.random() < 0.3:
            assert text_of(read_sse((await answer.aread()).decode())) == ask["input"][4:]
            return
        first = await take(answer, dice.randrange(1, 5))
    if not kind or dice.random() < 0.3:
        return
    async with plain(live) as client:
        events = first + await read_from(client, first[0]["response"]["id"], first[-1]["sequence_number"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert text_of(events) == ask["input"][4:]


@in_loop
async def test_random_disconnects_leak_nothing() -> None:
    async with scripted_server(step_time_s=0.001, resume_grace_s=2.0) as live:
        for start in range(0, 60, 20):
            await asyncio.gather(*(wander(live, seed) for seed in range(start, start + 20)))
        await live.become_idle()
        assert len(live.state.live_responses) == 0
        await until(lambda: not live.state.live_responses._ended)


@in_loop
async def test_a_server_that_stops_ends_what_runs_in_the_background() -> None:
    async with scripted_server(step_time_s=0.003) as live, plain(live) as client:
        created = (await create(client, "count", background=True)).json()
        assert live.engine.stats().num_open == 1
    assert live.engine.stats().num_open == 0
    stored = await live.state.archive.get(created["id"])
    assert stored is None  # forgotten with its store
    check_event({"type": "response.created", "sequence_number": 0, "response": json.loads(json.dumps(created))})
