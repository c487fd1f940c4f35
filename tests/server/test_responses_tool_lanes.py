"""Turns of a model that thinks and calls tools: which token ids go on in a lane, and what agents may send instead."""

import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from doubles_http import EOS, Turns
from doubles_http import LIMITS as DEMO_LIMITS
from doubles_responses import plain, read_sse
from doubles_socket import Live, in_loop, live_server, respond, scripted_engine
from doubles_tuning import make_engine
from jsonschema import validate

from aserve.config import EngineConfig
from aserve.demo_model import find_demo_model
from aserve.gguf_header import read_gguf_header
from aserve.tokenizer.gguf_vocabulary import build_gguf_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer

# As Qwen3's: thoughts stay in the prompt until the user speaks again.
TEMPLATE = """
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > last.user %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "name": "get_weather", "description": "Weather of a city.", "parameters": CITY}]
THOUGHT = "<think>\nI must look.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
REPLIES = [THOUGHT + CALL, "<think>\nNow I know.\n</think>\n\nSunny.", "You are welcome."]


def thinking_tokenizer() -> Tokenizer:
    header = read_gguf_header(find_demo_model().path)
    metadata = header.metadata | {"tokenizer.chat_template": TEMPLATE}
    return Tokenizer(*build_gguf_tokenizer(dataclasses.replace(header, metadata=metadata)))


@asynccontextmanager
async def thinking_server(device: Turns) -> AsyncIterator[Live]:
    async with (
        scripted_engine(device, limits=DEMO_LIMITS, tokenizer=thinking_tokenizer()) as engine,
        live_server(engine) as live,
    ):
        yield live


def result_of(response: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": response["output"][-1]["call_id"], "output": "sunny"}


@in_loop
async def test_a_lane_goes_on_with_what_was_thought_and_called_until_the_template_drops_it() -> None:
    device = Turns(REPLIES)
    async with thinking_server(device) as live, live.connect() as socket:
        ask: dict[str, Any] = {"tools": TOOLS, "store": False}
        first = (await respond(socket, input="Weather in Oslo?", **ask))[-1]["response"]
        assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
        second = (await respond(socket, input=[result_of(first)], previous_response_id=first["id"], **ask))[-1][
            "response"
        ]
        assert [item["type"] for item in second["output"]] == ["reasoning", "message"]
        third = (await respond(socket, input="Thanks.", previous_response_id=second["id"], **ask))[-1]["response"]
        await live.become_idle()
    one, two, three = device.prompts
    written = [*one, *device.replies[0], EOS]
    assert two[: len(written)] == written
    page = DEMO_LIMITS.page_size
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= len(written) - 2 * page
    # The user has spoken again: this template writes no thoughts any more, so ids are known up to the first of them.
    assert three[: len(one)] == one
    assert "<think>" not in thinking_tokenizer().decode(three, skip_special_tokens=False)
    assert third["usage"]["input_tokens_details"]["cached_tokens"] >= len(one) - 2 * page
    assert third["output"][0]["content"][0]["text"] == "You are welcome."


@in_loop
async def test_each_of_twenty_turns_computes_a_page_at_most_besides_what_is_new() -> None:
    device = Turns([THOUGHT + CALL] * 20 + [REPLIES[1]])
    ask: dict[str, Any] = {"tools": TOOLS, "store": False}
    async with thinking_server(device) as live, live.connect() as socket:
        response = (await respond(socket, input="Weather in Oslo?", **ask))[-1]["response"]
        for turn in range(20):
            fields = {"input": [result_of(response)], "previous_response_id": response["id"], **ask}
            response = (await respond(socket, **fields))[-1]["response"]
            known = [*device.prompts[turn], *device.replies[turn], EOS]
            assert device.prompts[turn + 1][: len(known)] == known
            usage = response["usage"]
            assert usage["input_tokens"] == len(device.prompts[turn + 1])
            assert usage["input_tokens_details"]["cached_tokens"] > len(known) - 1 - DEMO_LIMITS.page_size
        assert response["output"][-1]["content"][0]["text"] == "Sunny."


@in_loop
async def test_an_agent_that_sends_back_encrypted_content_gets_the_same_prompt() -> None:
    device = Turns(REPLIES)
    async with thinking_server(device) as live, plain(live) as client:
        fields: dict[str, Any] = {"tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}
        question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather in Oslo?"}]}
        first = (await client.post("/responses", json={"input": [question], **fields})).json()
        thought, call = first["output"]
        history = [
            question,
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": thought["encrypted_content"]},
            {key: call[key] for key in ("type", "call_id", "name", "arguments")},
            result_of(first),
        ]
        second = (await client.post("/responses", json={"input": history, **fields})).json()
        assert second["output"][-1]["content"][0]["text"] == "Sunny."
    tokenizer = thinking_tokenizer()
    one, two = (tokenizer.decode(prompt, skip_special_tokens=False) for prompt in device.prompts)
    assert two.startswith(f"{one}{REPLIES[0]}<|im_end|>\n<|im_start|>tool\nsunny")


@in_loop
async def test_the_effort_of_none_reaches_the_template() -> None:
    template = TEMPLATE.replace("{%- set last", "{{- 'effort ' ~ reasoning_effort ~ enable_thinking }}{% set last", 1)
    header = read_gguf_header(find_demo_model().path)
    metadata = header.metadata | {"tokenizer.chat_template": template}
    tokenizer = Tokenizer(*build_gguf_tokenizer(dataclasses.replace(header, metadata=metadata)))
    device = Turns(REPLIES)
    async with (
        scripted_engine(device, limits=DEMO_LIMITS, tokenizer=tokenizer) as engine,
        live_server(engine) as live,
        live.connect() as socket,
    ):
        await respond(socket, input="hi", reasoning={"effort": "none"})
    assert tokenizer.decode(device.prompts[0]).startswith("effort noneFalse")


CHOICES: list[Any] = [
    "required",
    {"type": "function", "name": "get_weather"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
]


@in_loop
async def test_the_demo_model_calls_what_it_has_to() -> None:
    other = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}
    async with (
        make_engine(EngineConfig()) as engine,
        live_server(engine) as live,
        live.connect() as socket,
        plain(live) as client,
    ):
        for choice in CHOICES:
            tools = TOOLS if choice == "required" else [other, *TOOLS]
            ask = {"input": "Say hello.", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
            if choice == "required":
                events = await respond(socket, max_output_tokens=60, **ask)
            else:
                body = {"stream": True, "max_output_tokens": 60, **ask}
                events = read_sse((await client.post("/responses", json=body)).text)
            response = events[-1]["response"]
            assert response["status"] == "completed"
            (call,) = response["output"]
            assert (call["type"], call["name"]) == ("function_call", "get_weather")
            validate(json.loads(call["arguments"]), CITY)
        bad = {**TOOLS[0], "strict": True, "parameters": {"type": "frob"}}
        for text, tool, param in (
            ({}, bad, "tools"),
            ({"format": {"type": "json_object"}}, bad, "tools"),
            ({"format": {"type": "json_schema", "name": "a", "schema": {"type": "frob"}}}, TOOLS[0], "text.format"),
        ):
            answer = await client.post("/responses", json={"input": "hi", "tools": [tool], "text": text})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
