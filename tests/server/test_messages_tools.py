"""Tools and thinking in /v1/messages: the same blocks streamed and whole, and what the model may call."""

import json
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from anthropic.types import Message, ToolUseBlock
from doubles_http import MODEL, demo_tokenizer, in_loop, live_server, say
from doubles_messages import HI, ask, read_events, strict
from doubles_parsing import WEATHER
from doubles_socket import Live as SocketLive
from doubles_socket import live_server as live_socket_server
from doubles_tuning import make_engine

from aserve.config import EngineConfig

TOOLS = [
    {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER},
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]
THOUGHT = "Hm, Praha: žluťoučký."
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pra } gue", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nLet me see.\n{CALLS}"


def accumulate(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put blocks together from their events as the protocol says; each must end before the next one begins."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(blocks))
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
        elif event["type"] == "content_block_delta":
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            add(blocks[-1], event["delta"])
        elif event["type"] == "content_block_stop":
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            is_open = False
    assert not is_open
    for block in blocks:
        if written := block.pop("json"):
            block["input"] = json.loads(written)
    return blocks


def add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    allowed = {
        "text": ("text_delta",),
        "thinking": ("thinking_delta", "signature_delta"),
        "tool_use": ("input_json_delta",),
    }
    assert delta["type"] in allowed[block["type"]]
    for source, target in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
        if source in delta:
            block[target] += delta[source]
    block |= {name: value for name, value in delta.items() if name == "signature"}


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [block["id"] for block in blocks if "id" in block]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@in_loop
async def test_thoughts_text_and_calls_are_blocks_streamed_and_whole() -> None:
    async with live_server(say(ANSWER), reasoning_parser="think") as live:
        message = (await ask(live, tools=TOOLS, max_tokens=200)).json()
        strict(Message, message)
        thinking, *others = without_ids(message["content"])
        assert (thinking["type"], thinking["thinking"], bool(thinking["signature"])) == ("thinking", THOUGHT, True)
        assert others == [
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "name": "get_weather", "input": {"city": "Pra } gue", "days": 3}},
            {"type": "tool_use", "name": "get_time", "input": {}},
        ]
        assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
        num_thinking = message["usage"]["output_tokens_details"]["thinking_tokens"]
        assert len(demo_tokenizer().encode(THOUGHT)) <= num_thinking < message["usage"]["output_tokens"] // 2

        events = read_events((await ask(live, tools=TOOLS, max_tokens=200, stream=True)).text)
        assert without_ids(accumulate(events)) == [thinking, *others]
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert events[-2]["usage"]["output_tokens_details"] == message["usage"]["output_tokens_details"]
        kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
        assert kinds.count("thinking_delta") > 3
        assert kinds.count("input_json_delta") > 3
        await live.until_idle()


@in_loop
async def test_thinking_that_is_to_be_omitted_leaves_its_signature() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    async with live_server(say(ANSWER), reasoning_parser="think") as live:
        shown = (await ask(live, tools=TOOLS, max_tokens=200)).json()["content"][0]
        whole = (await ask(live, tools=TOOLS, max_tokens=200, thinking=thinking)).json()["content"]
        assert whole[0] == {**shown, "thinking": ""}
        events = read_events((await ask(live, tools=TOOLS, max_tokens=200, thinking=thinking, stream=True)).text)
        assert without_ids(accumulate(events)) == without_ids(whole)


@in_loop
async def test_a_choice_of_no_tools_leaves_calls_as_text() -> None:
    async with live_server(say(CALLS)) as live:
        for tools in ({"tools": TOOLS, "tool_choice": {"type": "none"}}, {}):
            message = (await ask(live, max_tokens=200, **tools)).json()
            assert message["content"] == [{"type": "text", "text": CALLS}]
            assert message["stop_reason"] == "end_turn"
            usage = message["usage"]
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 31


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_calls_in_parallel_can_be_ruled_out(stream: bool) -> None:
    single = {"type": "auto", "disable_parallel_tool_use": True}
    async with live_server(say(CALLS)) as live:
        answer = await ask(live, tools=TOOLS, tool_choice=single, max_tokens=200, stream=stream)
        content = accumulate(read_events(answer.text)) if stream else answer.json()["content"]
        assert [block["name"] for block in content] == ["get_weather"]


@in_loop
async def test_a_call_that_was_cut_is_not_to_be_acted_on() -> None:
    cut = len(demo_tokenizer().encode(CALLS.partition("gue")[0]))
    async with live_server(say(CALLS)) as live:
        message = strict(Message, (await ask(live, tools=TOOLS, max_tokens=cut)).json())
        assert message.stop_reason == "max_tokens"
        assert [(block.name, block.input) for block in message.content] == [("get_weather", {})]
        events = read_events((await ask(live, tools=TOOLS, max_tokens=cut, stream=True)).text)
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"
        assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0]


@in_loop
async def test_tools_are_part_of_the_counted_prompt() -> None:
    functions = [
        {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "get_time", "parameters": TOOLS[1]["input_schema"]}},
    ]
    expected = len(demo_tokenizer().encode_chat(HI, tools=functions))
    assert expected > 100
    async with live_server(say("ok")) as live:
        counted = await live.post("/v1/messages/count_tokens", model=MODEL, messages=HI, tools=TOOLS)
        assert counted.json() == {"input_tokens": expected}
        assert (await ask(live, tools=TOOLS)).json()["usage"]["input_tokens"] == expected


async def check_thinking_is_bounded(live: SocketLive, client: anthropic.AsyncAnthropic) -> None:
    """Have the demo model go on with a thought, which it would never end, in both protocols that bound it."""
    messages: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>"}]
    thinking: Any = {"type": "enabled", "budget_tokens": 7}
    ask: Any = {"model": live.engine.model_name, "messages": messages, "max_tokens": 20, "thinking": thinking}
    greedy = {"temperature": 0, "ignore_eos": True}  # a thought that is drawn may end by itself, or within a character
    ask["extra_body"] = greedy
    message = await client.messages.create(**ask)
    assert [block.type for block in message.content] == ["thinking", "text"]
    usage = message.usage.to_dict()
    marker = len(demo_tokenizer().encode("</think>"))
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (20, {"thinking_tokens": 7})
    async with client.messages.stream(**ask) as stream:
        again = await stream.get_final_message()
    assert [block.type for block in again.content] == ["thinking", "text"]
    assert again.usage.to_dict()["output_tokens_details"] == {"thinking_tokens": 7}
    async with httpx.AsyncClient(base_url=live.http_url, timeout=60) as http:
        fields = {"continue_final_message": True, "thinking_token_budget": 7, "max_tokens": 7 + marker}
        body = {"messages": messages, **greedy, **fields}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}


@in_loop
async def test_the_demo_model_has_to_call_what_is_chosen_and_thinks_no_longer_than_it_may() -> None:
    tools: Any = TOOLS
    async with (
        make_engine(EngineConfig()) as engine,
        live_socket_server(engine) as live,
        anthropic.AsyncAnthropic(base_url=live.http_url, api_key="any", max_retries=0) as client,
    ):
        message = await client.messages.create(
            model=engine.model_name,
            max_tokens=100,
            messages=[{"role": "user", "content": "What time is it in Prague?"}],
            tools=tools,
            tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
            extra_body={"temperature": 0},
        )
        (call,) = message.content
        assert isinstance(call, ToolUseBlock)
        assert (message.stop_reason, call.name) == ("tool_use", "get_weather")
        jsonschema.validate(call.input, WEATHER)
        async with live_socket_server(engine, reasoning_parser="think") as thinking:
            await check_thinking_is_bounded(thinking, client.with_options(base_url=thinking.http_url))
