"""Order, shape and numbering of the events of one response (protocol.md 2.1); each is checked by the SDK's own type."""

from typing import Any

import orjson
import pytest
from doubles_engine import EOS
from doubles_socket import MODEL, ServedTokenizer, in_loop, kinds, respond, scripted_server, text_of

from aserve.parsing.answer_reader import AnswerReader
from aserve.parsing.registry import AnswerFormat
from aserve.request import RequestOutput, TokenLogprobs
from aserve.server.answer_events import AnswerEvents
from aserve.server.logprobs import TokenNames
from aserve.server.responses.events import ResponseEvents, ResponseStatus
from aserve.server.responses.schema import parse_create

ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@in_loop
async def test_events_of_a_text_response_come_in_the_protocols_order() -> None:
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="say Hello, world")
    assert [kind for kind in kinds(events) if kind != "response.output_text.delta"] == [*ORDER, "response.completed"]
    assert kinds(events)[4:-4] == ["response.output_text.delta"] * len("Hello, world")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert text_of(events) == "Hello, world"


@in_loop
async def test_the_parts_of_a_response_agree() -> None:
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="say Hello", instructions="be kind", metadata={"a": "b"}, temperature=0.5)
    created, in_progress, item_added, part_added, *deltas, text_done, part_done, item_done, completed = events
    first, last = created["response"], completed["response"]
    assert in_progress["response"] == first
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["error"], last["incomplete_details"]) == ("completed", None, None)
    assert first["id"] == last["id"]
    assert first["id"].startswith("resp_")
    assert (last["model"], last["object"], last["instructions"]) == (MODEL, "response", "be kind")
    assert (last["metadata"], last["temperature"], last["top_p"]) == ({"a": "b"}, 0.5, 1.0)
    assert last["created_at"] <= last["completed_at"]

    item = item_done["item"]
    assert item["id"].startswith("msg_")
    assert item_added["item"] == {**item, "status": "in_progress", "content": []}
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert part_added["part"]["text"] == ""
    assert part_done["part"] == item["content"][0]
    assert part_done["part"]["text"] == text_done["text"] == "Hello"
    assert last["output"] == [item]
    for event in (part_added, *deltas, text_done, part_done):
        assert (event["item_id"], event["output_index"], event["content_index"]) == (item["id"], 0, 0)

    num_prompt = len("be kind\nsay Hello\n")
    assert last["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len("Hello") + 1,  # and the token that ended it
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + len("Hello") + 1,
    }


@in_loop
async def test_the_token_limit_makes_a_response_incomplete() -> None:
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="count", max_output_tokens=5)
    assert [kind for kind in kinds(events) if kind != "response.output_text.delta"] == [*ORDER, "response.incomplete"]
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None
    assert response["usage"]["output_tokens"] == 5
    assert response["max_output_tokens"] == 5


@in_loop
async def test_an_empty_answer_has_every_event_but_deltas() -> None:
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="say ")
    assert kinds(events) == [*ORDER, "response.completed"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


@in_loop
async def test_a_row_that_fails_makes_a_failed_response_and_the_socket_lives() -> None:
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="fail")
        assert [kind for kind in kinds(events) if kind != "response.output_text.delta"] == [*ORDER, "response.failed"]
        response = events[-1]["response"]
        assert response["status"] == "failed"
        assert response["error"] == {"code": "server_error", "message": "this row cannot be sampled"}
        usage = response["usage"]  # a letter is a token
        assert (usage["input_tokens"], usage["output_tokens"]) == (len("fail\n"), len(text_of(events))) == (5, 3)
        assert usage["total_tokens"] == 8
        assert text_of(await respond(socket, input="say still here")) == "still here"


@in_loop
async def test_a_device_that_fails_ends_the_response_and_later_ones_are_refused() -> None:
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="crash")
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        (error,) = await respond(socket, input="say more")
    assert (error["type"], error["status"], error["error"]["code"]) == ("error", 500, "engine_error")


@in_loop
@pytest.mark.parametrize("top_logprobs", [None, 0, 3])
async def test_logprobs_come_one_for_each_token_and_spell_the_text(top_logprobs: int | None) -> None:
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="say Hi!", include=include, top_logprobs=top_logprobs)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    entries = [entry for event in deltas for entry in event["logprobs"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == b"Hi!"
    assert [entry["token"] for entry in entries] == ["H", "i", "!", "<eos>"]
    assert all(len(entry["top_logprobs"]) == (top_logprobs or 0) for entry in entries)
    assert all(-9999 <= top["logprob"] <= 0 for entry in entries for top in entry["top_logprobs"])
    text_done, part_done = events[-4], events[-3]
    assert text_done["logprobs"] == part_done["part"]["logprobs"] == entries
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries


@in_loop
async def test_without_the_include_there_are_no_logprobs() -> None:
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="say Hi", top_logprobs=5)
    assert all(event["logprobs"] == [] for event in events if event["type"] == "response.output_text.delta")


@in_loop
async def test_a_stop_string_is_never_shown() -> None:
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="say one, two, three", stop=[", t"])
        assert text_of(events) == "one"
        assert events[-1]["type"] == "response.completed"
        assert text_of(await respond(socket, input="say one, tw", stop=", two")) == "one, tw"


@in_loop
async def test_text_beyond_ascii_and_controls_arrive_unchanged() -> None:
    spoken = 'caf\xe9 "quoted" \\ \x85 \t'
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input=f"say {spoken}")
    assert text_of(events) == events[-4]["text"] == spoken
    assert EOS not in map(ord, spoken)


def test_log_probabilities_are_encoded_once() -> None:
    entries = [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}]
    request = parse_create({"input": "a", "include": ["message.output_text.logprobs"]}, 256)
    events = ResponseEvents(request, response_id="resp_1", model=MODEL, created_at=0)
    events.delta("a", entries * 2)
    events.delta("b", entries)
    entries[0]["logprob"] = object()  # from here on an encoder would refuse them
    ending = events.ending(ResponseStatus.COMPLETED)
    text_done, part_done, item_done, completed = (orjson.loads(payload) for _, payload in ending)
    assert [name for name, _ in ending] == [e["type"] for e in (text_done, part_done, item_done, completed)]
    expected = [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}] * 3
    assert text_done["logprobs"] == part_done["part"]["logprobs"] == expected
    assert item_done["item"]["content"][0]["logprobs"] == expected
    assert completed["response"]["output"] == [item_done["item"]]


@pytest.mark.parametrize("spoken", ["<think>Yes</think>Yes", "<think>Yes</think>No Yes"])
@pytest.mark.parametrize("at_once", [False, True])
def test_the_log_probabilities_of_a_text_are_not_those_of_the_same_words_thought(spoken: str, at_once: bool) -> None:
    tokenizer: Any = ServedTokenizer()
    request = parse_create({"input": "a", "include": ["message.output_text.logprobs"]}, 256)
    events = ResponseEvents(request, response_id="resp_1", model=MODEL, created_at=0)
    parser = AnswerFormat(None, "think").parser()
    assert parser is not None
    answer = AnswerEvents(events, AnswerReader(parser), TokenNames(tokenizer, hides_special=True))
    entries = [TokenLogprobs(ord(letter), -float(place)) for place, letter in enumerate(spoken)]
    outputs = [
        RequestOutput("r", letter, [ord(letter)], 1, place + 1, 0, None, None, [entries[place]])
        for place, letter in enumerate(spoken)
    ]
    if at_once:  # as for a peer that reads slowly
        for later in outputs[1:]:
            outputs[0].merge(later)
        del outputs[1:]
    found = [orjson.loads(payload) for output in outputs for _, payload in answer.read(output)]
    shown = [entry["logprob"] for event in found for entry in event.get("logprobs", ())]
    text = spoken.rpartition(">")[2]
    assert "".join(event["delta"] for event in found if event["type"].endswith("text.delta")) == f"Yes{text}"
    assert shown == [-float(place) for place in range(len(spoken) - len(text), len(spoken))]
