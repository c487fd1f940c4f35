"""Errors of /v1/messages: refused by name before the 200, in Anthropic's shape, with the id that the header has."""

import itertools
from typing import Any

import pytest
from doubles_http import MODEL, in_loop, live_server, say
from doubles_messages import HI, ask, read_events, strict_error

from aserve.runner.scripted import RowFailure

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
BAD_SCHEMA = {"name": "look", "input_schema": {"type": "nonsense"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": list(blocks)}, *HI]}


OBJECT = {"type": "json_schema", "schema": {"type": "object"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (user(), "messages[0].content"),
    (user(*[{**RESULT, "content": [{"type": "text", "text": "a"}] * 99}] * 101), "more than 10000 content blocks"),
    (user("hi"), "messages[0].content[0]"),
    (user({"text": "hi"}), "messages[0].content[0]"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "text", "text": "What is this?"}, IMAGE), "messages[0].content[1]"),
    (user({"type": "document", "source": {}}), "messages[0].content[0]"),
    (user({"type": {}, "text": "a"}), "messages[0].content[0]"),
    (user(CALL), "messages[0].content[0]"),
    (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (user({**RESULT, "content": [IMAGE]}), "messages[0].content[0].content[0]"),
    (assistant(RESULT), "messages[1].content[0]"),
    (assistant({**CALL, "input": "x"}), "messages[1].content[0].input"),
    (assistant({**CALL, "id": None}), "messages[1].content[0].id"),
    (assistant({"type": "thinking", "signature": ""}), "messages[1].content[0].thinking"),
    ({"messages": [*HI, {"role": "assistant", "content": [CALL]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"stop": ["x"]}, "stop_sequences"),
    ({"response_format": {"type": "json_object"}}, "output_config.format"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}}, "output_config.format"),
    ({"output_config": "x"}, "output_config"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "odd"}}}, "output_format"),
    ({"output_format": "x"}, "output_format"),
    ({"output_format": OBJECT, "output_config": {"format": OBJECT}}, "output_format"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"metadata": 5}, "metadata"),
    ({"tools": {}}, "tools"),
    ({"tools": ["look"]}, "tools[0]"),
    ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "look", "input_schema": "x"}]}, "tools[0].input_schema"),
    ({"tools": [LOOK, {"name": "look at", "input_schema": {}}]}, "tools[1].name"),
    ({"tools": [LOOK, LOOK]}, "two functions named look"),
    ({"tools": [{**LOOK, "description": 5}]}, "tools[0].description"),
    ({"tools": [{**LOOK, "strict": 1}]}, "tools[0].strict"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [LOOK], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "see"}}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "disable_parallel_tool_use"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [BAD_SCHEMA], "tool_choice": {"type": "any"}}, "tools"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "display"),
    ({"thinking": {"type": "loud"}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"n": 2}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]


@in_loop
async def test_wrong_fields_are_refused_by_name_before_the_200() -> None:
    async with live_server() as live:
        for (fields, name), stream in itertools.product(WRONG, (False, True)):
            answer = await ask(live, **{"messages": HI, "stream": stream, **fields})
            assert answer.status_code == 400, (fields, answer.text)
            assert answer.headers["content-type"] == "application/json"
            error = strict_error(answer.json())
            assert error.error.type == "invalid_request_error"
            assert name in error.error.message, (fields, error.error.message)
            assert error.request_id == answer.headers["request-id"] == answer.headers["x-request-id"]
        assert live.engine.metrics.num_steps == 0
        await live.check_alive()


@in_loop
async def test_each_status_has_its_type() -> None:
    async with live_server(say("ok"), max_body_mib=0.01) as live:
        for method, path, fields, status, kind in [
            ("POST", "/v1/messages", {"model": "claude"}, 404, "not_found_error"),
            ("POST", "/v1/messages/count_tokens", {"model": "claude"}, 404, "not_found_error"),
            ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
            ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
            ("POST", "/v1/messages", {"system": "x" * 20_000}, 413, "request_too_large"),
        ]:
            body = {"model": MODEL, "max_tokens": 1, "messages": HI, **fields}
            answer = await live.http.request(method, path, json=body, headers={"x-request-id": "mine-1"})
            assert answer.status_code == status, (path, answer.text)
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == kind
            assert answer.json()["request_id"] == answer.headers["request-id"] == "mine-1"
        broken = await live.http.post("/v1/messages", content=b"{")
        assert strict_error(broken.json()).error.type == "invalid_request_error"
        other = await live.http.get("/v1/models/messages")
        assert "type" not in other.json()
        assert "request-id" not in other.headers


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_failed_row_ends_its_answer_with_an_error(stream: bool) -> None:
    def failing(tokens: Any, position: int) -> Any:
        if position > 33:
            raise RowFailure("this row cannot be sampled")
        return 300

    async with live_server(failing) as live:
        answer = await ask(live, stream=stream)
        if stream:
            *events, error = read_events(answer.text)
            assert [event["type"] for event in events][:2] == ["message_start", "content_block_start"]
            assert events[-1]["type"] == "content_block_delta"
        else:
            assert answer.status_code == 500
            error = answer.json()
        assert strict_error(error).error.type == "api_error"
        assert error["request_id"] == answer.headers["request-id"]
        await live.until_idle()


@in_loop
async def test_a_tool_that_cannot_be_enforced_is_not_blamed_on_the_format() -> None:
    good, bad = {"type": "object"}, {"type": "object", "properties": {"a": {"type": "string", "pattern": "["}}}
    async with live_server(say("ok")) as live:
        for tool, shape, blamed in ((bad, good, "tools: "), (good, bad, "output_config.format: ")):
            answer = await ask(
                live,
                tools=[{"name": "f", "input_schema": tool, "strict": True}],
                output_config={"format": {"type": "json_schema", "schema": shape}},
            )
            assert answer.status_code == 400
            assert strict_error(answer.json()).error.message.startswith(blamed)


KEY = "a-long-secret-key"


@in_loop
async def test_the_key_passes_in_either_header() -> None:
    async with live_server(say("ok"), api_key=KEY) as live:
        for path in ("/v1/messages", "/v1/chat/completions"):
            for headers, status in [
                ({"x-api-key": KEY}, 200),
                ({"authorization": f"Bearer {KEY}"}, 200),
                ({"x-api-key": "wrong", "authorization": f"Bearer {KEY}"}, 200),
                ({"x-api-key": KEY, "authorization": "Bearer wrong"}, 200),
                ({"x-api-key": f"{KEY}x"}, 401),
                ({"x-api-key": ""}, 401),
                ({"x-api-key": f"Bearer {KEY}"}, 401),
                ({}, 401),
            ]:
                body = {"model": MODEL, "max_tokens": 5, "messages": HI}
                answer = await live.http.post(path, json=body, headers=headers)
                assert answer.status_code == status, (headers, answer.text)
                if status == 401:
                    assert answer.json()["error"]["type"] == "authentication_error"
                    assert ("request_id" in answer.json()) == (path == "/v1/messages")
