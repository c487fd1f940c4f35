"""The official Python client against live servers: scripted for exact answers, and the demo model for real ones."""

import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from doubles_http import MODEL, Live, demo_tokenizer, in_loop, live_server, say
from doubles_process import ServingProcess, serving
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from aserve.runner.scripted import RowFailure

REPLY = "Dobrý den, 😀 world!"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def official(live: Live, key: str = "any", **options: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, **options) as client:
        yield client


@in_loop
async def test_chat() -> None:
    async with live_server(say(REPLY)) as live, official(live) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, n=2)
        assert [choice.message.content for choice in answer.choices] == [REPLY, REPLY]
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=1,
        )
        text, usage, entries = "", None, 0
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                entries += len(choice.logprobs.content or ()) if choice.logprobs else 0
        assert text == REPLY
        assert usage is not None
        assert usage.completion_tokens == entries == len(demo_tokenizer().encode(REPLY)) + 1


@in_loop
async def test_the_streaming_helper_accumulates_a_whole_completion() -> None:
    async with live_server(say(REPLY)) as live, official(live) as client:
        async with client.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == REPLY
        assert final.choices[0].finish_reason == "stop"
        assert "content.delta" in kinds
        assert "content.done" in kinds


@in_loop
async def test_completions() -> None:
    async with live_server(say(REPLY)) as live, official(live) as client:
        answer = await client.completions.create(model=MODEL, prompt=["assistant\n"] * 2, echo=True, logprobs=1)
        assert [choice.text for choice in answer.choices] == [f"assistant\n{REPLY}"] * 2
        stream = await client.completions.create(model=MODEL, prompt="assistant\n", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == REPLY


@in_loop
async def test_models_and_errors() -> None:
    def script(tokens: Any, position: int) -> int:
        if position > 40:
            raise RowFailure("this row cannot be sampled")
        return 300

    async with live_server(script, api_key="secret") as live, official(live, "secret") as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
        assert wrong.value.param == "temperature"
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        chunks = aiter(stream)
        assert (await anext(chunks)).choices[0].delta.role == "assistant"
        with pytest.raises(openai.APIError):
            [chunk async for chunk in chunks]
        async with official(live, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


@in_loop
async def test_leaving_a_stream_ends_its_request() -> None:
    async with live_server(step_time_s=0.002) as live, official(live) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, max_tokens=4000)
        async for _ in stream:
            break
        await stream.close()
        await live.until_idle()
        assert live.engine.stats().num_aborts == 1


class GetWeather(BaseModel):
    """Tell the weather of a city."""

    city: str
    days: int


CALLING = (
    'I look.\n<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Plzeň \\"x\\" }", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Brno", "days": 1}}\n</tool_call>'
)
WEATHERS = [GetWeather(city='Plzeň "x" }', days=3), GetWeather(city="Brno", days=1)]


@in_loop
async def test_tools_made_of_models_come_back_parsed() -> None:
    async with live_server(say(CALLING)) as live, official(live) as client:
        tools = [openai.pydantic_function_tool(GetWeather)]
        parsed = await client.chat.completions.parse(model=MODEL, messages=HELLO, tools=tools)
        message = parsed.choices[0].message
        assert [call.function.parsed_arguments for call in message.tool_calls or ()] == WEATHERS
        assert (message.content, parsed.choices[0].finish_reason) == ("I look.", "tool_calls")
        async with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=tools) as stream:
            seen = [event async for event in stream]
            final = await stream.get_final_completion()
        calls = final.choices[0].message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == WEATHERS
        done = [event for event in seen if event.type == "tool_calls.function.arguments.done"]
        assert [(event.index, event.parsed_arguments) for event in done] == list(enumerate(WEATHERS))
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(model=MODEL, messages=HELLO, tools=tools, max_tokens=40)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    """``python -m aserve serve`` with the demo model, ready."""
    command = [sys.executable, "-m", "aserve", "serve", "--port", "{port}", "--drain-timeout-s", "2"]
    with serving(command, tmp_path_factory.mktemp("demo") / "log", is_watched=False) as server:
        server.wait_for("/ready", 200, 100)
        yield server


@pytest.mark.timeout(300)
def test_the_demo_model_answers_the_same_streamed_or_not(demo: ServingProcess) -> None:
    with OpenAI(base_url=f"{demo.url}/v1", api_key="any", max_retries=0) as client:
        (model,) = client.models.list().data
        ask: dict[str, Any] = {"model": model.id, "messages": HELLO, "max_tokens": 24, "temperature": 0}
        plain = client.chat.completions.create(**ask)
        assert plain.usage is not None
        assert plain.usage.prompt_tokens == 31
        text = "".join(
            chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)
        )
        assert text == plain.choices[0].message.content
        assert "hel" in text.lower() or "assist" in text.lower()  # it answers a greeting
        again = client.chat.completions.create(**ask)
        assert again.choices[0].message.content == text
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == 16
        scores = (
            client.completions.create(
                model=model.id, prompt="The capital of France is Paris.", echo=True, max_tokens=0, logprobs=1
            )
            .choices[0]
            .logprobs
        )
        assert scores is not None
        assert scores.token_logprobs is not None
        assert all(value <= 0 for value in scores.token_logprobs[1:])
        assert len(scores.token_logprobs) == len(demo_tokenizer().encode("The capital of France is Paris."))


@pytest.mark.timeout(300)
def test_the_demo_model_calls_what_it_has_to(demo: ServingProcess) -> None:
    light = {
        "type": "object",
        "properties": {"room": {"enum": ["kitchen", "hall"]}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["room", "level"],
        "additionalProperties": False,
    }
    tools: list[Any] = [
        {"type": "function", "function": {"name": "set_light", "parameters": light, "strict": True}},
        {"type": "function", "function": {"name": "wait"}},
    ]
    with OpenAI(base_url=f"{demo.url}/v1", api_key="any", max_retries=0) as client:
        ask: dict[str, Any] = {"model": client.models.list().data[0].id, "messages": HELLO, "seed": 1, "max_tokens": 60}
        named = {"type": "function", "function": {"name": "set_light"}}
        for choice in ("required", named):
            answer = client.chat.completions.create(
                **ask, tools=tools, tool_choice=choice, parallel_tool_calls=False, temperature=1.5, n=2
            )
            for one in answer.choices:
                (call,) = one.message.tool_calls or ()
                assert one.finish_reason == "tool_calls"
                assert one.message.content is None
                arguments = json.loads(call.function.arguments)
                if call.function.name == "set_light":
                    assert arguments.keys() == {"room", "level"}
                    assert arguments["room"] in ("kitchen", "hall")
                    assert arguments["level"] in range(10)
                else:
                    assert (choice, call.function.name, arguments) == ("required", "wait", {})
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        shape = {"name": "answer", "schema": {**schema, "additionalProperties": False}}
        either = client.chat.completions.create(
            **ask,
            tools=tools[:1],
            parallel_tool_calls=False,
            response_format={"type": "json_schema", "json_schema": shape},
        ).choices[0]
        assert either.finish_reason == "tool_calls" or json.loads(either.message.content).keys() == {"ok"}


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_the_demo_model_drains_and_exits(demo: ServingProcess) -> None:
    body = {"messages": HELLO, "max_tokens": 8000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{demo.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        demo.terminate()
        started = time.monotonic()
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert '"error"' in rest[-4]
    assert demo.wait(10) == 0
    assert time.monotonic() - started < 2 + 6
    demo.check_log()
