"""``response.steer``: each order of events, by the protocol's text and the official types."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from doubles_engine import settle, until
from doubles_http import demo_tokenizer
from doubles_responses import plain
from doubles_slow_peer import say, slow_peer
from doubles_socket import (
    LIMITS,
    MODEL,
    TERMINAL,
    Live,
    ServedTokenizer,
    check_event,
    in_loop,
    in_one_write,
    kinds,
    live_server,
    receive,
    receive_until,
    respond,
    scripted_engine,
    scripted_server,
    send,
    text_of,
)
from openai.types.responses import ResponseSteerFailedEvent
from websockets.asyncio.client import ClientConnection

from aserve.scheduler.limits import Limits
from aserve.tokenizer.spans import Span

ACCEPTED, FAILED = "response.steer.accepted", "response.steer.failed"
OPENING = ["response.created", "response.in_progress"]
CLOSING = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


async def begin(socket: ClientConnection, deltas: int = 3, **fields: Any) -> list[dict[str, Any]]:
    """Create an endless response; return its events up to the given number of deltas."""
    await send(socket, **{"input": "count", **fields})
    events = await receive_until(socket, "response.in_progress")
    for _ in range(deltas):
        events += await receive_until(socket, "response.output_text.delta")
    return events


async def steer(socket: ClientConnection, response_id: str, text: Any = "say Yes", **fields: Any) -> None:
    await send(socket, "response.steer", previous_response_id=response_id, input=text, **fields)


async def steered(socket: ClientConnection) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the events up to the end of the response that is steered, and those of its successor."""
    return await receive_until(socket, *TERMINAL), await receive_until(socket, *TERMINAL)


def id_of(events: list[dict[str, Any]]) -> str:
    return str(events[0]["response"]["id"])


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["sequence_number"] for event in events]


def answer_of(event: dict[str, Any]) -> str:
    return "".join(item["content"][0]["text"] for item in event["response"]["output"])


@in_loop
@pytest.mark.parametrize("stream_id", [None, "A"])
async def test_a_steered_response_ends_early_and_its_successor_goes_on(stream_id: str | None) -> None:
    settings = {"instructions": "be kind", "temperature": 0.5, "metadata": {"a": "b"}, "user": "u"}
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket, 30, stream_id=stream_id, **settings)
        await steer(socket, id_of(first))
        rest, second = await steered(socket)
        await live.become_idle()
    first += rest
    accepted = next(event for event in first if event["type"] == ACCEPTED)
    assert accepted["steer"]["previous_response_id"] == id_of(first)
    assert accepted["steer"]["id"].startswith("steer_")
    assert kinds(first)[-4:] == [*CLOSING, "response.incomplete"]
    ended = first[-1]["response"]
    assert (ended["status"], ended["incomplete_details"]) == ("incomplete", {"reason": "steered"})
    assert ended["output"][0]["status"] == "incomplete"
    assert (answer_of(first[-1]), ended["completed_at"]) == (text_of(first), None)
    assert kinds(second)[:2] == OPENING
    assert (second[-1]["type"], text_of(second)) == ("response.completed", "Yes")
    for events in (first, second):
        assert numbers(events) == list(range(len(events)))
        assert {event.get("stream_id") for event in events} == {stream_id}
    begun = second[0]["response"]
    assert begun["previous_response_id"] == id_of(first) != begun["id"]
    assert {name: begun[name] for name in settings} == settings
    usage = second[-1]["response"]["usage"]
    history = f"be kind\ncount\n{text_of(first)}"
    assert usage["input_tokens"] == len(f"{history}\nsay Yes\n")
    assert usage["input_tokens_details"]["cached_tokens"] >= len(history) - LIMITS.page_size


@in_loop
async def test_before_the_first_token_there_is_no_output_to_keep() -> None:
    async with scripted_server(step_time_s=None) as live, live.connect() as socket:
        runner = live.engine._parts.runner
        first = await begin(socket, 0)
        await steer(socket, id_of(first), [{"role": "user", "content": [{"type": "input_text", "text": "say Yes"}]}])
        first += await receive_until(socket, *TERMINAL)
        assert kinds(first) == [*OPENING, ACCEPTED, "response.incomplete"]
        assert first[-1]["response"]["output"] == []
        reading = asyncio.create_task(receive_until(socket, *TERMINAL))
        while not reading.done():
            if runner.launched:
                runner.complete_next()
            await asyncio.sleep(0.001)
        second = await reading
        assert text_of(second) == "Yes"
        assert second[-1]["response"]["usage"]["input_tokens"] == len("count\nsay Yes\n")


class OddWriter:
    """Writes its first answer in pieces that no tokenizer would choose, and keeps all prompts."""

    def __init__(self) -> None:
        tokenizer = demo_tokenizer()
        self.cue = tokenizer.encode("assistant\n", add_special_tokens=False)
        self.odd = [token for piece in ("Hel", "lo", " the", "re") for token in tokenizer.encode(piece)]
        self.prompts: list[list[int]] = []

    def __call__(self, tokens: Sequence[int], position: int) -> int:
        known = list(tokens[:position])
        start = next(end for end in range(position, 0, -1) if known[end - len(self.cue) : end] == self.cue)
        if start == position:
            self.prompts.append(known)
        if len(self.prompts) > 1:
            return 2
        return self.odd[(position - start) % len(self.odd)]


@in_loop
async def test_the_successor_continues_the_token_ids_that_were_written() -> None:
    tokenizer, writer = demo_tokenizer(), OddWriter()
    limits = Limits(
        vocab_size=49152, max_model_len=8192, max_num_seqs=8, max_num_batched_tokens=1024, num_pages=4096, page_size=16
    )
    async with (
        scripted_engine(writer, step_time_s=0.01, limits=limits, tokenizer=tokenizer) as engine,
        live_server(engine) as live,
        live.connect() as socket,
    ):
        first = await begin(socket, input="hi")
        await steer(socket, id_of(first), "and you?")
        rest, second = await steered(socket)
    before, after = writer.prompts
    num_written = rest[-1]["response"]["usage"]["output_tokens"]
    written = [writer.odd[place % len(writer.odd)] for place in range(num_written)]
    assert tokenizer.encode(answer_of(rest[-1])) != written
    new = tokenizer.encode("<|im_end|>\n<|im_start|>user\nand you?<|im_end|>\n<|im_start|>assistant\n")
    assert after == [*before, *written, *new]
    assert second[-1]["response"]["usage"]["input_tokens"] == len(after)


@in_loop
async def test_several_steers_at_once_have_one_successor() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket)
        one = {"type": "response.steer", "previous_response_id": id_of(first)}
        in_one_write(socket, *({**one, "input": text} for text in ("aaa", "bbb", "say Yes")))
        second: list[dict[str, Any]] = []
        while not second or second[-1]["type"] not in TERMINAL:  # some may be accepted when the first one has ended
            event = await receive(socket)
            is_second = second or (event["type"] == "response.created")
            (second if is_second else first).append(event)
    assert kinds(first).count(ACCEPTED) == 3
    assert len({event["steer"]["id"] for event in first if event["type"] == ACCEPTED}) == 3
    assert numbers(first) == list(range(len(first)))
    ended = next(event for event in first if event["type"] == "response.incomplete")
    assert text_of(second) == "Yes"
    history = f"count\n{answer_of(ended)}\naaa\nbbb\nsay Yes\n"
    assert second[-1]["response"]["usage"]["input_tokens"] == len(history)


@in_loop
async def test_the_successor_can_be_steered_in_its_turn() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        events = await begin(socket)
        texts = []
        for _ in range(4):
            await steer(socket, id_of(events), "count")
            ended = (await receive_until(socket, *TERMINAL))[-1]["response"]
            assert ended["incomplete_details"] == {"reason": "steered"}
            texts.append(ended["output"][0]["content"][0]["text"])
            events = await receive_until(socket, "response.output_text.delta")
        await steer(socket, id_of(events))
        rest, last = await steered(socket)
        texts.append(answer_of(rest[-1]))
        assert last[-1]["response"]["usage"]["input_tokens"] == len("".join(f"count\n{text}\n" for text in texts)) + 8
        await live.become_idle()


async def failure(socket: ClientConnection) -> dict[str, Any]:
    """Return the next event, a failed steer; its input is what the client sent and need not suit the type."""
    event = json.loads(await socket.recv())
    assert event["type"] == FAILED, event
    ResponseSteerFailedEvent.model_validate({**event, "steer": {**event["steer"], "input": ""}})
    assert event["error"]["type"] == "invalid_request_error"
    return dict(event)


@in_loop
async def test_what_has_ended_takes_no_more_input() -> None:
    async with scripted_server(step_time_s=0.002) as live, live.connect() as socket, live.connect() as other:
        done = await respond(socket, input="say a", stream_id="A")
        for extra in range(2):
            await steer(socket, id_of(done), "more")
            failed = await failure(socket)
            assert failed["error"]["code"] == "response_already_completed"
            assert failed["sequence_number"] == len(done) + extra
            assert failed["stream_id"] == "A"
            assert failed["steer"] == {"previous_response_id": id_of(done), "input": "more"}
        running = await begin(socket, stream_id="A")
        await steer(socket, id_of(done), "more")  # the one before the lane's present one
        while json.loads(await socket.recv())["type"] != FAILED:
            pass
        await send(socket, "response.cancel", stream_id="A")
        await receive_until(socket, *TERMINAL)
        await steer(socket, id_of(running), "more")
        assert (await failure(socket))["error"]["code"] == "response_not_active"
        broken = await respond(socket, input="fail")
        await steer(socket, id_of(broken), "more")
        assert (await failure(socket))["error"]["code"] == "response_not_active"
        for connection, response_id in ((other, id_of(done)), (socket, "resp_none")):
            await steer(connection, response_id, "more")
            failed = await failure(connection)
            assert (failed["error"]["code"], failed["sequence_number"]) == ("response_not_found", 0)
            assert "stream_id" not in failed
        assert text_of(await respond(socket, input="say b", previous_response_id=id_of(running))) == "b"


@in_loop
async def test_the_steered_response_takes_no_more_input_once_its_successor_has_begun() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket)
        await steer(socket, id_of(first), "count")
        await receive_until(socket, *TERMINAL)
        second = await receive_until(socket, "response.created")
        await steer(socket, id_of(first), "more")
        while (event := json.loads(await socket.recv()))["type"] != FAILED:
            second.append(event)
        assert event["error"]["code"] == "response_not_active"
        await send(socket, "response.cancel")
        second += await receive_until(socket, *TERMINAL)
        assert numbers(second) == list(range(len(second)))


USER = {"role": "user", "content": "a"}


@in_loop
@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["a"],
        [{"role": "assistant", "content": "a"}],
        [{"role": "system", "content": "a"}],
        [{"content": "a"}],
        [USER, {"type": "function_call_output", "call_id": "c", "output": "o"}],
        [{"type": "reasoning", "summary": []}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "input_text"}]}],
        [USER] * 4097,
        [{"role": "user", "content": [json.loads("[" * 100 + "]" * 100)]}],
    ],
)
async def test_input_that_is_no_users_message_is_handed_back(wrong: Any) -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket, stream_id="A")
        await steer(socket, id_of(first), wrong)
        while (event := json.loads(await socket.recv()))["type"] == "response.output_text.delta":
            first.append(event)
        assert (event["type"], event["error"]["code"]) == (FAILED, "invalid_input")
        assert event["steer"] == {"previous_response_id": id_of(first), "input": wrong}
        assert event["stream_id"] == "A"
        first.append(event)
        first += await receive_until(socket, "response.output_text.delta")  # goes on
        assert numbers(first) == list(range(len(first)))


@in_loop
async def test_the_lane_is_not_the_clients_to_choose() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket)
        await steer(socket, id_of(first), stream_id="B")
        failed = (await receive_until(socket, FAILED))[-1]
        assert failed["error"]["code"] == "invalid_input"
        assert "stream_id" in failed["error"]["message"]
        await steer(socket, id_of(first), event_id="unknown fields are ignored")
        _, second = await steered(socket)
        assert text_of(second) == "Yes"


@in_loop
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "a"}, "previous_response_id"),
        ({"input": "a", "previous_response_id": 7}, "previous_response_id"),
        ({"input": "a", "previous_response_id": "x" * 257}, "previous_response_id"),
        ({"previous_response_id": "resp_1"}, "input"),
        ({"previous_response_id": "resp_1", "input": {"role": "user"}}, "input"),
        ({"previous_response_id": "resp_1", "input": json.loads("[" * 400 + "]" * 400)}, "input"),
    ],
)
async def test_what_cannot_be_handed_back_is_an_error(fields: dict[str, Any], param: str) -> None:
    async with scripted_server() as live, live.connect() as socket:
        await send(socket, "response.steer", **fields)
        error = await receive(socket)
        assert (error["type"], error["status"], error["error"]["param"]) == ("error", 400, param)
        assert len(str(error)) < 400


@in_loop
async def test_a_warm_up_cannot_be_steered() -> None:
    async with scripted_server(step_time_s=None) as live, live.connect() as socket:
        first = await begin(socket, 0, generate=False)
        await steer(socket, id_of(first))
        assert (await failure(socket))["error"]["code"] == "steering_not_supported"
        runner = live.engine._parts.runner
        while runner.launched:
            runner.complete_next()
        assert kinds(await receive_until(socket, *TERMINAL)) == ["response.completed"]


@in_loop
async def test_without_a_successor_the_input_is_handed_back_and_the_response_can_be_continued() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket, stream_id="A", store=False)
        await steer(socket, id_of(first), "x" * 5000)
        first += await receive_until(socket, *TERMINAL)
        accepted = next(event for event in first if event["type"] == ACCEPTED)
        failed = await receive(socket)
        assert failed["error"]["code"] == "successor_creation_failed"
        assert "context" in failed["error"]["message"]
        assert failed["steer"] == {**accepted["steer"], "input": "x" * 5000}
        assert numbers([*first, failed]) == list(range(len(first) + 1))
        again = await respond(socket, input="say b", previous_response_id=id_of(first), stream_id="A")
        assert text_of(again) == "b"
        await live.become_idle()


@in_loop
async def test_a_successor_that_fails_evicts_what_it_continued() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket, store=False)
        await steer(socket, id_of(first), "fail")
        _, second = await steered(socket)
        assert second[-1]["type"] == "response.failed"
        (error,) = await respond(socket, input="say b", previous_response_id=id_of(first))
        assert error["error"]["code"] == "previous_response_not_found"


@in_loop
async def test_a_stopping_server_lets_the_response_end_but_takes_no_input_for_it() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket, input="say " + "a" * 60)
        live.state.begin_drain()
        await steer(socket, id_of(first))
        events = await receive_until(socket, *TERMINAL)
        failed = next(event for event in events if event["type"] == FAILED)
        assert failed["error"]["code"] == "successor_creation_failed"
        assert text_of(first + events) == "a" * 60


@in_loop
async def test_a_cancel_behind_a_steer_cancels_the_successor() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket)
        one = {"type": "response.steer", "previous_response_id": id_of(first), "input": "count"}
        in_one_write(socket, one, {"type": "response.cancel"})
        first, second = await steered(socket)
        assert first[-1]["response"]["incomplete_details"] == {"reason": "steered"}
        assert kinds(second)[:2] == OPENING
        assert second[-1]["response"]["status"] == "cancelled"
        assert text_of(await respond(socket, input="say next")) == "next"
        await live.become_idle()


@in_loop
async def test_a_steer_behind_a_cancel_is_too_late() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket)
        one = {"type": "response.steer", "previous_response_id": id_of(first), "input": "count"}
        in_one_write(socket, {"type": "response.cancel"}, one)
        events = await receive_until(socket, *TERMINAL)
        assert events[-1]["response"]["status"] == "cancelled"
        assert (await failure(socket))["error"]["code"] == "response_not_active"


@in_loop
async def test_what_waits_in_the_lane_has_its_turn_after_the_successor() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket, stream_id="A")
        await send(socket, input="say next", stream_id="A")
        await steer(socket, id_of(first), "say " + "Yes" * 10)
        ends = [await receive_until(socket, *TERMINAL) for _ in range(3)]
        assert [text_of(end) for end in ends[1:]] == ["Yes" * 10, "next"]


@in_loop
async def test_other_lanes_are_left_alone() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        await send(socket, input="say " + "b" * 50, stream_id="B")
        await receive_until(socket, "response.in_progress")
        await send(socket, input="count", stream_id="A")
        first = [event for event in await receive_until(socket, "response.in_progress") if event["stream_id"] == "A"]
        await steer(socket, id_of(first))
        lanes: dict[str, list[dict[str, Any]]] = {"A": [], "B": []}
        while [kinds(lanes[lane]).count("response.completed") for lane in "AB"] != [1, 1]:
            event = await receive(socket)
            lanes[event["stream_id"]].append(event)
        assert lanes["B"][-1]["response"]["output"][0]["content"][0]["text"] == "b" * 50
        assert lanes["A"][-1]["response"]["previous_response_id"] == id_of(first)


@in_loop
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_leaves_behind_its_steer_leaves_nothing(how: str) -> None:
    async with scripted_server(step_time_s=0.003) as live:
        for _ in range(5):
            socket = await live.connect()
            first = await begin(socket)
            await steer(socket, id_of(first), "count")
            if how == "close":
                await socket.close()
            else:
                socket.transport.abort()
        await live.lose_connections()
        await live.become_idle()


class HeldTokenizer(ServedTokenizer):
    """Encodes no turn with several messages before it may."""

    def __init__(self) -> None:
        self.is_held = threading.Event()
        self.may_go_on = threading.Event()
        self.encoded: list[int] = []

    def encode_turn(self, messages: Sequence[dict[str, Any]], known: Sequence[Span], **options: Any) -> list[Span]:
        if len(messages) > 1:
            self.is_held.set()
            self.may_go_on.wait(10)
            self.encoded.append(len(messages))
        return super().encode_turn(messages, known, **options)


@asynccontextmanager
async def held_server() -> AsyncIterator[tuple[Live, HeldTokenizer]]:
    tokenizer = HeldTokenizer()
    async with scripted_engine(step_time_s=0.003, tokenizer=tokenizer) as engine, live_server(engine) as live:
        try:
            yield live, tokenizer
        finally:
            tokenizer.may_go_on.set()


@in_loop
async def test_input_that_comes_while_the_successor_is_made_is_part_of_it_up_to_a_bound() -> None:
    async with held_server() as (live, tokenizer), live.connect() as socket:
        first = await begin(socket, stream_id="A")
        for place in range(17):
            await steer(socket, id_of(first), "say Yes" if place == 15 else f"text {place:02}")
            await until(tokenizer.is_held.is_set)
        events = await receive_until(socket, FAILED)
        assert kinds(events).count(ACCEPTED) == 16
        assert events[-1]["error"]["code"] == "too_many_pending_steers"
        assert "id" not in events[-1]["steer"]
        first += events
        assert numbers(first) == list(range(len(first)))
        tokenizer.may_go_on.set()
        second = await receive_until(socket, *TERMINAL)
        assert text_of(second) == "Yes"
        texts = "\n".join(f"text {place:02}" for place in range(15))
        ended = next(event for event in first if event["type"] == "response.incomplete")
        history = f"count\n{answer_of(ended)}\n{texts}\nsay Yes\n"
        assert second[-1]["response"]["usage"]["input_tokens"] == len(history)
        assert tokenizer.encoded == [3, 18]
        async with plain(live) as client:
            listed = (await client.get(f"/responses/{id_of(second)}/input_items", params={"order": "asc"})).json()
        assert [item["content"][0]["text"] for item in listed["data"]][-1] == "say Yes"
        assert len(listed["data"]) == 16


@in_loop
async def test_a_connection_that_closes_while_the_successor_is_made_leaves_nothing() -> None:
    async with held_server() as (live, tokenizer):
        async with live.connect() as socket:
            first = await begin(socket)
            await steer(socket, id_of(first))
            await receive_until(socket, *TERMINAL)
        await live.lose_connections()
        tokenizer.may_go_on.set()
        await live.become_idle()
        assert live.engine.prompts.num_pending == 0


@in_loop
async def test_what_waits_is_handed_back_in_order_when_there_is_no_successor() -> None:
    async with held_server() as (live, tokenizer), live.connect() as socket:
        first = await begin(socket)
        for text in ("aaa", "x" * 5000, "bbb"):
            await steer(socket, id_of(first), text)
        events = await receive_until(socket, *TERMINAL)
        while kinds(events).count(ACCEPTED) < 3:
            events.append(await receive(socket))
        tokenizer.may_go_on.set()
        failed = [await receive(socket) for _ in range(3)]
        assert [event["steer"]["input"] for event in failed] == ["aaa", "x" * 5000, "bbb"]
        given = [event["steer"]["id"] for event in events if event["type"] == ACCEPTED]
        assert [event["steer"]["id"] for event in failed] == given
        everything = first + events + failed
        assert numbers(everything) == list(range(len(everything)))


@in_loop
@pytest.mark.parametrize("kind", [{}, {"resumable": True}])
async def test_a_response_that_ends_by_itself_first_stays_completed(kind: dict[str, Any]) -> None:
    """The engine has finished, but a peer that does not read has not been told yet."""
    async with scripted_engine() as engine, slow_peer(engine) as (session, peer):
        peer.is_writable = False
        await say(session, input="say done", **kind)
        await until(lambda: engine.metrics.num_generation_tokens == len("done") + 1 and not engine.stats().num_open)
        (response_id,) = [lane.running.response_id for lane in session._lanes.values() if lane.running is not None]
        await say(session, "response.steer", previous_response_id=response_id, input="say more")
        peer.read()
        await until(lambda: kinds(peer.events).count("response.completed") == 2 - bool(kind))
        await settle()
    first = [event for event in peer.events if event["type"] != FAILED]
    if kind:  # its log has ended, so it has completed
        failed = peer.events[-1]
        assert (failed["type"], failed["error"]["code"]) == (FAILED, "response_already_completed")
        assert numbers(peer.events) == list(range(len(peer.events)))
        return
    end = kinds(first).index("response.completed") + 1
    first, second = first[:end], first[end:]
    assert ACCEPTED in kinds(first)
    assert (text_of(first), text_of(second)) == ("done", "more")
    assert second[0]["response"]["previous_response_id"] == response_id
    for events in (first, second):
        assert numbers(events) == list(range(len(events)))


@in_loop
@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_a_response_that_ends_badly_has_no_successor(how: str) -> None:
    async with scripted_engine(step_time_s=0.001) as engine, slow_peer(engine) as (session, peer):
        peer.is_writable = False
        await say(session, input="fail" if how == "failed" else "count")
        await until(lambda: engine.metrics.num_generation_tokens >= 2)
        if how == "failed":
            await until(lambda: not engine.stats().num_open)
        (lane,) = [lane for lane in session._lanes.values() if lane.running is not None]
        response_id = lane.running.response_id
        await say(session, "response.steer", previous_response_id=response_id, input="say more")
        if how == "cancelled":
            await say(session, "response.cancel", response_id=response_id)
        peer.read()
        await until(lambda: FAILED in kinds(peer.events))
    assert peer.events[-2]["type"] == ("response.failed" if how == "failed" else "response.incomplete")
    assert peer.events[-2]["response"]["status"] == how
    assert peer.events[-1]["error"]["code"] == "response_not_active"
    assert peer.events[-1]["steer"]["id"] == next(e["steer"]["id"] for e in peer.events if e["type"] == ACCEPTED)
    assert numbers(peer.events) == list(range(len(peer.events)))


@in_loop
async def test_a_peer_that_does_not_read_what_is_handed_back_to_it_is_cut_off() -> None:
    """What is refused stays behind the last events of the response, which wait for the peer."""
    async with scripted_engine() as engine, slow_peer(engine) as (session, peer):
        peer.is_writable = False
        await say(session, input="say done", resumable=True)
        await until(lambda: engine.metrics.num_generation_tokens == len("done") + 1 and not engine.stats().num_open)
        (response_id,) = [lane.running.response_id for lane in session._lanes.values() if lane.running is not None]
        for _ in range(4):
            await say(session, "response.steer", previous_response_id=response_id, input="x" * 1_000_000)
        assert not peer.is_closed
        await say(session, "response.steer", previous_response_id=response_id, input="x" * 1_000_000)
        assert peer.is_closed


async def read_stored(live: Live, response_id: str) -> list[dict[str, Any]]:
    async with plain(live) as client:
        answer = await client.get(f"/responses/{response_id}", params={"stream": "true"})
        assert answer.status_code == 200, answer.text
        blocks = answer.text.split("\n\n")[:-1]
        return [check_event(json.loads(block.splitlines()[1].removeprefix("data: "))) for block in blocks]


@in_loop
async def test_a_resumable_response_and_its_successor_can_be_read_again() -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        first = await begin(socket, stream_id="A", resumable=True)
        await steer(socket, id_of(first))
        rest, second = await steered(socket)
        first += rest
        for events in (first, second):
            assert numbers(events) == list(range(len(events)))
            without_lane = [{name: value for name, value in event.items() if name != "stream_id"} for event in events]
            assert await read_stored(live, id_of(events)) == without_lane
        assert text_of(second) == "Yes"
        await live.become_idle()


@in_loop
@pytest.mark.parametrize("background", [False, True])
async def test_a_response_that_a_socket_resumes_can_be_steered_there(background: bool) -> None:
    async with scripted_server(step_time_s=0.003) as live, live.connect() as socket:
        if background:
            async with plain(live) as client:
                fields = {"model": MODEL, "input": "count", "background": True}
                response_id = (await client.post("/responses", json=fields)).json()["id"]
        else:
            async with live.connect() as lost:
                response_id = id_of(await begin(lost, resumable=True))
        await send(socket, "response.resume", response_id=response_id, stream_id="B")
        events = await receive_until(socket, "response.output_text.delta")
        await steer(socket, response_id)
        rest, second = await steered(socket)
        events += rest
        assert events[-1]["response"]["incomplete_details"] == {"reason": "steered"}
        assert (second[0]["stream_id"], second[0]["response"]["background"]) == ("B", background)
        assert text_of(second) == "Yes"
        for one in (events, second):
            assert numbers(one) == list(range(len(one)))
        third = await respond(socket, input="say c", previous_response_id=id_of(second), stream_id="B")
        history = f"count\n{answer_of(events[-1])}\nsay Yes\nYes\nsay c\n"
        assert third[-1]["response"]["usage"]["input_tokens"] == len(history)
        await live.become_idle()
