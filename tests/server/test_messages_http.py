"""/v1/messages over real sockets: shapes, the order of events, why an answer ends, usage, prefill and limits."""

import asyncio
import json
import threading
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount
from doubles_engine import until
from doubles_http import LIMITS, MODEL, count_up, demo_tokenizer, in_loop, live_server, once_set, raw_post, say
from doubles_messages import HI, ask, read_event, read_events, strict

REPLY = "Hello, Žluťoučký kůň 😀!\u2028A new line."
NUM_OUTPUT = len(demo_tokenizer().encode(REPLY)) + 1  # EOS counts


@in_loop
async def test_one_answer_has_the_official_shape() -> None:
    async with live_server(say(REPLY)) as live:
        answer = await ask(live)
        assert answer.headers["content-type"] == "application/json"
        message: Message = strict(Message, answer.json())
        assert message.id.startswith("msg_")
        assert message.model == MODEL
        assert [block.to_dict() for block in message.content] == [{"type": "text", "text": REPLY}]
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (31, 0, NUM_OUTPUT)
        await live.until_idle()


@in_loop
async def test_events_come_in_the_official_order() -> None:
    async with live_server(say(REPLY)) as live:
        answer = await ask(live, stream=True)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        start, block, *deltas, block_end, ending, stop = read_events(answer.text)
        assert start["type"] == "message_start"
        assert start["message"]["content"] == []
        assert (start["message"]["stop_reason"], start["message"]["usage"]["input_tokens"]) == (None, 31)
        expected = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        assert block == expected
        assert {(one["type"], one["index"], one["delta"]["type"]) for one in deltas} == {
            ("content_block_delta", 0, "text_delta")
        }
        assert "".join(one["delta"]["text"] for one in deltas) == REPLY
        assert len(deltas) > 5
        assert block_end == {"type": "content_block_stop", "index": 0}
        assert ending["type"] == "message_delta"
        assert ending["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert ending["usage"]["output_tokens"] == NUM_OUTPUT
        assert stop == {"type": "message_stop"}
        await live.until_idle()


@in_loop
async def test_a_prefix_hit_is_told_apart_from_what_was_computed() -> None:
    async with live_server(say("yes")) as live:
        messages = [{"role": "user", "content": "word " * 40}]
        cold, warm = [(await ask(live, messages)).json()["usage"] for _ in range(2)]
        cached = (cold["input_tokens"] - 1) // 16 * 16
        assert cold["cache_read_input_tokens"] == 0
        assert (warm["input_tokens"], warm["cache_read_input_tokens"]) == (cold["input_tokens"] - cached, cached)
        assert read_events((await ask(live, messages, stream=True)).text)[-2]["usage"] == warm


def ending_of(message: dict[str, Any]) -> tuple[str, str | None]:
    return message["stop_reason"], message["stop_sequence"]


@in_loop
async def test_an_answer_says_why_it_ends() -> None:
    cases: list[tuple[dict[str, Any], str, tuple[str, str | None]]] = [
        ({}, REPLY, ("end_turn", None)),
        ({"stop_sequences": ["nothing", " 😀"]}, REPLY.split(" 😀")[0], ("stop_sequence", " 😀")),
        ({"stop_sequences": ["Hello"]}, "", ("stop_sequence", "Hello")),
        ({"max_tokens": 1}, "Hello", ("max_tokens", None)),
        ({"max_tokens": 0}, "", ("max_tokens", None)),
    ]
    async with live_server(say(REPLY)) as live:
        for fields, text, ending in cases:
            message = strict(Message, (await ask(live, **fields)).json())
            assert "".join(block.text for block in message.content) == text
            assert (message.stop_reason, message.stop_sequence) == ending
            events = read_events((await ask(live, stream=True, **fields)).text)
            shown = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
            assert "".join(shown) == text
            assert ending_of(events[-2]["delta"]) == ending
            assert len(message.content) == bool(text) == sum(event["type"] == "content_block_stop" for event in events)


@in_loop
async def test_an_answer_that_fills_the_context_says_so() -> None:
    limits = type(LIMITS)(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"max_model_len": 40})
    async with live_server(say("word ", then=None), limits=limits) as live:
        message = (await ask(live, max_tokens=4000)).json()
        assert message["stop_reason"] == "model_context_window_exceeded"
        assert message["usage"]["output_tokens"] == 9
        assert (await ask(live, max_tokens=9)).json()["stop_reason"] == "max_tokens"


@in_loop
async def test_every_form_of_text_makes_the_same_prompt() -> None:
    block = {"type": "text", "text": "kind.", "cache_control": {"type": "ephemeral"}, "citations": None}
    turn = {"role": "user", "content": "hi"}
    async with live_server() as live:

        async def count(messages: Any, **fields: Any) -> int:
            answer = await live.post("/v1/messages/count_tokens", model=MODEL, messages=messages, **fields)
            assert answer.status_code == 200, answer.text
            return int(strict(MessageTokensCount, answer.json()).input_tokens)

        def expected(*messages: tuple[str, str], **options: Any) -> int:
            chat = [{"role": role, "content": content} for role, content in messages]
            return len(demo_tokenizer().encode_chat(chat, **options))

        assert await count([turn]) == 31
        assert await count([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]) == 31
        with_system = expected(("system", "You are kind."), ("user", "hi"))
        for system in ("You are kind.", [{"type": "text", "text": "You are "}, block]):
            assert await count([turn], system=system) == with_system
        assert await count([{"role": "system", "content": "You are kind."}, turn]) == with_system
        assert await count([turn, turn]) == expected(("user", "hi\n\nhi"))
        begun = [turn, {"role": "assistant", "content": "The answer is"}]
        assert await count(begun) == expected(
            ("user", "hi"), ("assistant", "The answer is"), continue_final_message=True
        )
        assert (await ask(live, begun, max_tokens=1)).json()["usage"]["input_tokens"] == await count(begun)


TURN = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}}


@in_loop
async def test_calls_results_and_thoughts_of_earlier_turns_are_rendered_as_the_other_routes_render_them() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "blue"}]}
    messages = [
        TURN,
        {"role": "assistant", "content": [thought, redacted, {"type": "text", "text": "I look."}, CALL]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    function = {"name": "look", "arguments": '{"at":"sky"}'}
    call = {"id": "toolu_1", "type": "function", "function": function}
    same = [
        TURN,
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "blue"},
        {"role": "user", "content": "And?"},
    ]
    async with live_server() as live:
        usage = (await ask(live, messages, max_tokens=1)).json()["usage"]
        chat = (await live.post("/v1/chat/completions", messages=same, max_tokens=1)).json()["usage"]
        assert usage["input_tokens"] == chat["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@in_loop
async def test_unknown_fields_and_headers_of_the_protocol_change_nothing(path: str) -> None:
    fields = {
        "cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "u"}, "service_tier": "auto", "system": None,
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low", "format": None},
        "context_management": {"edits": []}, "stop_sequences": [], "temperature": 1, "top_k": None, "nobody_knows": [1],
        "speed": "standard", "inference_geo": None, "container": None, "chat_template_kwargs": {"x": 1},
    }  # fmt: skip
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "a-2025-01-01,b",
        "content-type": "application/json",
    }
    async with live_server(say("ok")) as live:
        body = json.dumps({"model": MODEL, "max_tokens": 9, "messages": HI, **fields})
        answer = await live.http.post(f"{path}?beta=true", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert "31" in answer.text


@in_loop
async def test_silence_is_filled_with_pings_after_the_start() -> None:
    body = {"max_tokens": 3, "messages": HI, "stream": True}
    may_speak = threading.Event()
    async with (
        live_server(once_set(may_speak, say("one two")), keep_alive_s=0.1) as live,
        raw_post(live, "/v1/messages", body) as (reader, _),
    ):
        await reader.readuntil(b"\r\n\r\n")
        text = "".join([(await reader.readuntil(b"event: ping")).decode() for _ in range(2)])
        may_speak.set()
        text += (await reader.readuntil(b"content_block_start")).decode()
        lines = [line for line in text.splitlines() if line.startswith(("event: ", "data: "))][:-1]
        events = [read_event("\n".join(pair)) for pair in zip(lines[::2], lines[1::2], strict=True)]
        assert [event["type"] for event in events[:3]] == ["message_start", "ping", "ping"]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    async with live_server(count_up, step_time_s=0.002) as live:
        async with raw_post(live, "/v1/messages", {"max_tokens": 4000, "messages": HI, "stream": stream}):
            await until(lambda: live.engine.stats().num_running == 1)
        await live.until_idle()
        assert live.engine.stats().num_aborts == 1


@in_loop
async def test_requests_past_the_queue_are_refused_and_the_others_served() -> None:
    limits = type(LIMITS)(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"max_num_seqs": 2})
    all_are_there = threading.Event()
    script, engine = once_set(all_are_there, count_up), {"max_queued_requests": 10}
    async with live_server(script, limits=limits, step_time_s=0.002, engine=engine) as live:
        asked = [asyncio.create_task(ask(live, max_tokens=50, stream=i % 2 == 0)) for i in range(60)]
        await until(lambda: sum(answer.done() for answer in asked) >= 48, 30)
        all_are_there.set()
        answers = await asyncio.gather(*asked)
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 48 <= len(refused) <= 50  # the device's two start only when a step is planned
        for answer in refused:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "overloaded_error"
        await live.until_idle()
