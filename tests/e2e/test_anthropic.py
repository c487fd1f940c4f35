"""The official Anthropic client against live servers with exact answers."""

import asyncio
import json
import re
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam
from doubles_http import MODEL, answer_by, demo_tokenizer, in_loop, live_server, say
from doubles_messages import known, official

from aserve.runner.scripted import RowFailure

REPLY = "Dobrý den, 😀 world!"
HELLO: list[MessageParam] = [{"role": "user", "content": "hi"}]
NUM_OUTPUT = len(demo_tokenizer().encode(REPLY)) + 1  # EOS counts


@in_loop
async def test_whole_and_streamed_messages_are_the_same() -> None:
    async with live_server(say(REPLY)) as live, official(live) as client:
        whole = await client.messages.create(
            model=MODEL, max_tokens=50, messages=HELLO, system="be kind", extra_body={"temperature": 0.5, "top_k": 5}
        )
        assert known(whole).content[0].text == REPLY
        assert whole._request_id is not None
        raw = await client.messages.create(model=MODEL, max_tokens=50, messages=HELLO, stream=True)
        text, kinds = "", []
        async for event in raw:
            kinds.append(event.type)
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                text += event.delta.text
        assert text == REPLY
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@in_loop
async def test_the_streaming_helper_accumulates_a_whole_message() -> None:
    async with live_server(say(REPLY)) as live, official(live) as client:
        for _ in range(2):
            async with client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
        assert known(final).content[0].text == text == REPLY
        assert (final.stop_reason, final.stop_sequence) == ("end_turn", None)
        usage = final.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (15, 16, NUM_OUTPUT)


@in_loop
async def test_the_synchronous_client() -> None:
    def converse(url: str) -> None:
        with Anthropic(base_url=url, auth_token="secret", max_retries=0) as client:
            assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens == 31
            with client.messages.stream(
                model=MODEL, max_tokens=50, messages=HELLO, stop_sequences=["world"], metadata={"user_id": "u"}
            ) as stream:
                final = stream.get_final_message()
            assert final.content[0].type == "text"
            assert final.content[0].text == REPLY.partition("world")[0]
            assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "world")
            turn: list[MessageParam] = [*HELLO, final.to_param(), {"role": "user", "content": "go on"}]
            assert client.messages.create(model=MODEL, max_tokens=50, messages=turn).usage.cache_read_input_tokens == 32
            beta = client.beta.messages.create(model=MODEL, max_tokens=50, messages=[*HELLO], betas=["a-2026-01-01"])
            assert beta.content[0].type == "text"
            assert beta.content[0].text == REPLY

    async with live_server(say(REPLY), api_key="secret") as live:
        await asyncio.to_thread(converse, live.url)


@in_loop
async def test_errors_are_raised_as_the_client_knows_them() -> None:
    def script(tokens: Any, position: int) -> int:
        if position > 40:
            raise RowFailure("this row cannot be sampled")
        return 300

    image: list[MessageParam] = [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]}
    ]
    async with live_server(script, api_key="secret") as live, official(live, "secret") as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="claude", max_tokens=5, messages=HELLO)
        assert missing.value.type == "not_found_error"
        assert missing.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="of type 'image'") as wrong:
            await client.messages.create(model=MODEL, max_tokens=5, messages=image)
        assert wrong.value.type == "invalid_request_error"
        with pytest.raises(anthropic.InternalServerError):
            await client.messages.create(model=MODEL, max_tokens=50, messages=HELLO)
        stream = await client.messages.create(model=MODEL, max_tokens=50, messages=HELLO, stream=True)
        events = aiter(stream)
        assert (await anext(events)).type == "message_start"
        with pytest.raises(anthropic.APIStatusError) as broken:
            [event async for event in events]
        assert broken.value.type == "api_error"
        async with official(live, "wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.count_tokens(model=MODEL, messages=HELLO)


@in_loop
async def test_leaving_a_stream_ends_its_request() -> None:
    async with live_server(step_time_s=0.002) as live, official(live) as client:
        stream = await client.messages.create(model=MODEL, max_tokens=4000, messages=HELLO, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await live.until_idle()
        assert live.engine.stats().num_aborts == 1


def look_then_say(prompt: str) -> str:
    """Call both functions, then answer with what they gave back."""
    if "<tool_response>\n" not in prompt:
        calls = [{"name": "weather", "arguments": {"city": "Brno"}}, {"name": "fail", "arguments": {}}]
        return "I look.\n" + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
    return "They say: " + ", ".join(results)


@anthropic.beta_tool
def weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: Its name.
    """
    return f"rain in {city}"


@anthropic.beta_tool
def fail() -> str:
    """Always fail."""
    raise RuntimeError("it broke")


@in_loop
async def test_the_tool_runner_runs_a_loop_of_tools() -> None:
    def loop(url: str) -> None:
        with Anthropic(base_url=url, api_key="any", max_retries=0) as client:
            for stream in (False, True):
                runner = client.beta.messages.tool_runner(
                    model=MODEL, max_tokens=200, messages=[*HELLO], tools=[weather, fail], stream=stream
                )
                final = runner.until_done()
                assert final.stop_reason == "end_turn"
                assert final.content[0].type == "text"
                assert final.content[0].text.startswith("They say: rain in Brno, Error: ")
                assert "it broke" in final.content[0].text

    async with live_server(answer_by(look_then_say)) as live:
        await asyncio.to_thread(loop, live.url)


@in_loop
async def test_a_loop_by_hand_gives_thoughts_and_calls_back() -> None:
    def choose(prompt: str) -> str:
        return f"<think>I should look.</think>{look_then_say(prompt)}"

    tools: list[ToolParam] = [
        {"name": name, "description": name, "input_schema": {"type": "object"}} for name in ("weather", "fail")
    ]
    async with live_server(answer_by(choose), reasoning_parser="think") as live, official(live) as client:
        messages = [*HELLO]
        kinds: set[str] = set()
        while True:
            async with client.messages.stream(model=MODEL, max_tokens=200, messages=messages, tools=tools) as stream:
                kinds |= {event.type async for event in stream}
                message = known(await stream.get_final_message())
            messages.append(message.to_param())
            calls = [block for block in message.content if block.type == "tool_use"]
            if message.stop_reason != "tool_use":
                break
            assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Brno"}), ("fail", {})]
            results: list[ToolResultBlockParam] = [
                {"type": "tool_result", "tool_use_id": call.id, "content": call.name} for call in calls
            ]
            messages.append({"role": "user", "content": results})
        assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= kinds
        thinking, text = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "I should look.")
        assert (text.type, text.text) == ("text", "They say: weather, fail")
        assert len(messages) == 4
