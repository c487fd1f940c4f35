"""What is refused, how it is said, and that the socket lives on (protocol.md 1.2 and 1.6)."""

import json
import sys
from typing import Any

import pytest
from doubles_socket import in_loop, receive, receive_until, respond, scripted_server, send, text_of
from websockets.asyncio.client import ClientConnection


async def check_alive(socket: ClientConnection) -> None:
    assert text_of(await respond(socket, input="say fine")) == "fine"


@in_loop
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_json"),
        ("", "invalid_json"),
        ("[]", "invalid_json"),
        ('"response.create"', "invalid_json"),
        ('{"type": NaN}', "invalid_json"),
        ('{"a":' * 2000 + "1" + "}" * 2000, "invalid_json"),
        ("{}", "unknown_event_type"),
        ('{"type": "session.update"}', "unknown_event_type"),
        ('{"type": ["response.create"]}', "unknown_event_type"),
        ('{"type": "response.steer", "input": "x"}', "invalid_input"),
    ],
)
async def test_messages_that_cannot_be_understood(text: str, code: str) -> None:
    async with scripted_server() as live, live.connect() as socket:
        await socket.send(text)
        error = await receive(socket)
        assert (error["type"], error["status"]) == ("error", 400)
        assert set(error["error"]) == {"type", "code", "message", "param"}
        assert (error["error"]["type"], error["error"]["code"]) == ("invalid_request_error", code)
        assert "sequence_number" not in error
        if code == "unknown_event_type":
            assert "response.create" in error["error"]["message"]
            assert "response.resume" in error["error"]["message"]
        await check_alive(socket)


@in_loop
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"content": "hi"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "function_call_output", "output": "b"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": ["text"]}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": "a"}] * 4097}, "input"),
        ({"input": "a", "temperature": "hot"}, "temperature"),
        ({"input": "a", "temperature": True}, "temperature"),
        ({"input": "a", "temperature": -0.1}, "temperature"),
        ({"input": "a", "top_p": 1.0001}, "top_p"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 1.5}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 2**31}, "max_output_tokens"),
        ({"input": "a", "top_k": -2}, "top_k"),
        ({"input": "a", "min_p": 1.1}, "min_p"),
        ({"input": "a", "seed": 2**64}, "seed"),
        ({"input": "a", "stop": ["x"] * 17}, "stop"),
        ({"input": "a", "stop": [""]}, "stop"),
        ({"input": "a", "stop": 1}, "stop"),
        ({"input": "a", "stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"input": "a", "priority": 2**31}, "priority"),
        ({"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"input": "a", "include": ["everything"]}, "include"),
        ({"input": "a", "include": [{}]}, "include"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata"),
        ({"input": "a", "metadata": {str(key): "" for key in range(17)}}, "metadata"),
        ({"input": "a", "instructions": ["x"]}, "instructions"),
        ({"input": "a", "previous_response_id": 7}, "previous_response_id"),
    ],
)
async def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    async with scripted_server() as live, live.connect() as socket:
        (error,) = await respond(socket, **fields)
        assert (error["status"], error["error"]["type"]) == (400, "invalid_request_error")
        assert error["error"]["param"] == param
        await check_alive(socket)


@in_loop
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "mcp", "server_label": "s"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with scripted_server() as live, live.connect() as socket:
        (error,) = await respond(socket, input="say a", **fields)
        assert (error["error"]["param"], error["error"]["code"]) == (param, "unsupported_parameter")
        assert param.split(".")[0] in error["error"]["message"]
        await check_alive(socket)


NULLABLE = [
    "background", "client_metadata", "conversation", "frequency_penalty", "generate", "ignore_eos", "include",
    "instructions", "max_output_tokens", "metadata", "min_p", "model", "moderation", "parallel_tool_calls",
    "presence_penalty", "previous_response_id", "prompt", "prompt_cache_key", "prompt_cache_options", "reasoning",
    "repetition_penalty", "seed", "service_tier", "stop", "store", "stream", "stream_id", "stream_options",
    "temperature", "text", "tool_choice", "tools", "top_k", "top_logprobs", "top_p", "truncation", "user",
]  # fmt: skip


@in_loop
async def test_null_means_absent_for_every_field() -> None:
    async with scripted_server() as live, live.connect() as socket:
        plain = await respond(socket, input="say a")
        for name in NULLABLE:
            events = await respond(socket, input="say a", **{name: None})
            assert text_of(events) == "a", name
            for field in ("temperature", "top_p", "usage", "tool_choice", "max_output_tokens"):
                if field != "usage":
                    assert events[-1]["response"][field] == plain[-1]["response"][field]


@in_loop
async def test_what_clients_send_without_need_is_accepted() -> None:
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(
            socket,
            input="say a",
            stream=True,
            store=True,
            tools=[],
            tool_choice="auto",
            parallel_tool_calls=True,
            truncation="disabled",
            background=False,
            text={"format": {"type": "text"}, "verbosity": "low"},
            reasoning={"effort": "low"},
            include=["reasoning.encrypted_content"],
            client_metadata={"a": "b"},
            prompt_cache_key="k",
            some_field_of_the_future={"a": [1]},
            model="scripted",
        )
        assert text_of(events) == "a"
        await send(socket, "response.processed", response_id=events[-1]["response"]["id"])
        tools = [{"type": "function", "name": "f", "parameters": {}}]
        assert text_of(await respond(socket, input="say b", tools=tools, tool_choice="none")) == "b"


HOSTILE = ("../../etc/passwd", "/etc/passwd", "%2e%2e/x", "x" * 10_000, "\0", "scripted\0", "Scripted", "", " scripted")


@in_loop
async def test_hostile_names_open_no_file_and_are_not_repeated() -> None:
    opened: list[str] = []
    is_watching = False

    def watch(event: str, arguments: Any) -> None:
        if is_watching and event in ("open", "os.listdir", "os.scandir"):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    async with scripted_server() as live, live.connect() as socket:
        await check_alive(socket)
        is_watching = True
        for name in HOSTILE:
            for kind, field, status, code in (
                ("response.create", "model", 404, "model_not_found"),
                ("response.create", "previous_response_id", 400, "previous_response_not_found"),
                ("response.cancel", "response_id", 404, "response_not_found"),
                ("response.create", "stream_id", 400, "invalid_stream_id"),
            ):
                if (field, name) == ("stream_id", "Scripted"):
                    continue  # a good one
                await send(socket, kind, **{"input": "say a", field: name})
                error = await receive(socket)
                assert (error["type"], error["status"], error["error"]["code"]) == ("error", status, code)
                assert error["error"]["param"] == field
                assert "passwd" not in str(error)
                assert "%2e" not in str(error)
                assert len(str(error)) < 400
        is_watching = False
        assert opened == []
        await check_alive(socket)


@in_loop
async def test_a_message_of_more_than_a_mebibyte_is_read_and_a_prompt_that_cannot_fit_refused() -> None:
    async with scripted_server() as live, live.connect() as socket:
        assert text_of(await respond(socket, input="say a", client_metadata={"pad": "x" * (3 << 20)})) == "a"
        (error,) = await respond(socket, input="y" * (3 << 20))
        assert (error["status"], error["error"]["code"]) == (400, "context_length_exceeded")
        assert error["error"]["param"] == "input"
        await check_alive(socket)


@in_loop
async def test_a_message_of_many_small_values_is_refused_before_it_is_parsed() -> None:
    async with scripted_server() as live, live.connect() as socket:
        await socket.send('{"type":"response.create","input":[' + "[]," * 300_000 + "[]]}")
        error = await receive(socket)
        assert (error["status"], error["error"]["code"]) == (400, "body_too_complex")
        await check_alive(socket)


@in_loop
async def test_errors_keep_their_place_among_the_responses_of_a_lane() -> None:
    async with scripted_server(step_time_s=0.001) as live, live.connect() as socket:
        await send(socket, input="say one")
        await send(socket, input="say two", temperature=-1)
        await send(socket, input="say three")
        assert text_of(await receive_until(socket, "response.completed")) == "one"
        assert (await receive(socket))["error"]["param"] == "temperature"
        assert text_of(await receive_until(socket, "response.completed")) == "three"


@in_loop
async def test_a_binary_message_closes_with_1003() -> None:
    async with scripted_server() as live, live.connect() as socket:
        await socket.send(json.dumps({"type": "response.create", "input": "say a"}).encode())
        await socket.wait_closed()
        assert socket.close_code == 1003


@in_loop
async def test_a_frame_over_the_limit_closes_with_1009() -> None:
    async with scripted_server(max_frame_mib=0.5) as live, live.connect() as socket:
        await socket.send("x" * (1 << 19))  # at the limit
        assert (await receive(socket))["error"]["code"] == "invalid_json"
        await socket.send(["x" * (1 << 18), "x" * (1 << 18), "x"])  # over it, in fragments
        await socket.wait_closed()
        assert socket.close_code == 1009
