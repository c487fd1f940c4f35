"""The official Python client's helpers over HTTP: streams that accumulate, and answers parsed into models."""

import asyncio
from itertools import pairwise
from typing import Any

import openai
import pytest
from doubles_http import MODEL, demo_tokenizer, in_loop, live_server, say
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
REPLY = "Dobr\u00fd den, \U0001f600 world!"


class Report(BaseModel):
    """How warm it is."""

    city: str
    fahrenheit: float


REPORT = Report(city="Plze\u0148", fahrenheit=70.7)
WRITTEN = '{"city": "Plze\u0148", "fahrenheit": 70.7}'
CALL = f'I look.\n<tool_call>\n{{"name": "Report", "arguments": {WRITTEN}}}\n</tool_call>'


def official(live: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)


@in_loop
async def test_chat_is_parsed_into_a_model() -> None:
    async with live_server(say(WRITTEN)) as live, official(live) as client:
        parsed = await client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Report, n=2)
        assert [choice.message.parsed for choice in parsed.choices] == [REPORT, REPORT]
        async with client.chat.completions.stream(
            model=MODEL, messages=HELLO, response_format=Report, logprobs=True, stream_options={"include_usage": True}
        ) as stream:
            seen = [event async for event in stream]
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == REPORT
        partial = [event.parsed for event in seen if event.type == "content.delta"]
        assert {"city": "Plze\u0148"} in partial, "what has come is parsed on the way"
        (done,) = (event for event in seen if event.type == "content.done")
        assert (done.content, done.parsed) == (WRITTEN, REPORT)
        (scores,) = (event for event in seen if event.type == "logprobs.content.done")
        assert b"".join(bytes(entry.bytes or ()) for entry in scores.content).decode().startswith(WRITTEN)
        assert final.usage is not None
        assert final.usage.completion_tokens == len(demo_tokenizer().encode(WRITTEN)) + 1
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Report, max_tokens=3)


@in_loop
async def test_responses_are_parsed_into_a_model() -> None:
    async with live_server(say(WRITTEN)) as live, official(live) as client:
        parsed = await client.responses.parse(model=MODEL, input="hi", text_format=Report)
        assert parsed.output_parsed == REPORT
        async with client.responses.stream(model=MODEL, input="hi", text_format=Report) as stream:
            seen = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_parsed == REPORT
        snapshots = [event.snapshot for event in seen if event.type == "response.output_text.delta"]
        assert snapshots[-1] == WRITTEN
        assert all(after.startswith(before) for before, after in pairwise(snapshots))
        (done,) = (event for event in seen if event.type == "response.output_text.done")
        assert (done.text, done.parsed) == (WRITTEN, REPORT)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))


@in_loop
async def test_calls_of_responses_are_parsed_into_a_model() -> None:
    tools = [openai.pydantic_function_tool(Report)]
    async with live_server(say(CALL)) as live, official(live) as client:
        parsed = await client.responses.parse(model=MODEL, input="hi", tools=tools)
        async with client.responses.stream(model=MODEL, input="hi", tools=tools) as stream:
            seen = [event async for event in stream]
            final = await stream.get_final_response()
        for response in (parsed, final):
            message, call = response.output
            assert message.type == "message"
            assert response.output_text == "I look."
            assert call.type == "function_call"
            assert call.parsed_arguments == REPORT
        snapshots = [event.snapshot for event in seen if event.type == "response.function_call_arguments.delta"]
        assert snapshots[-1] == WRITTEN


@in_loop
async def test_a_stream_is_taken_up_where_it_was_left() -> None:
    """The helper reads the created event again, and passes on what comes after the number that it is given."""
    async with live_server(say(REPLY), step_time_s=0.01) as live, official(live) as client:
        response_id, last = "", 0
        async with client.responses.stream(model=MODEL, input="hi", background=True) as stream:
            async for event in stream:
                last = event.sequence_number
                if event.type == "response.created":
                    response_id = event.response.id
                if event.type == "response.output_text.delta":
                    break
        async with client.responses.stream(response_id=response_id, starting_after=last) as stream:
            rest = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
        assert final.output_text == REPLY
        assert (await client.responses.retrieve(response_id)).output_text == REPLY


@in_loop
async def test_the_same_helpers_of_the_sync_client() -> None:
    def converse(url: str) -> None:
        with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            parsed = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Report)
            assert parsed.choices[0].message.parsed == REPORT
            with client.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Report) as chat:
                assert chat.until_done().get_final_completion().choices[0].message.parsed == REPORT
            assert client.responses.parse(model=MODEL, input="hi", text_format=Report).output_parsed == REPORT
            with client.responses.stream(model=MODEL, input="hi", text_format=Report) as stream:
                assert stream.until_done().get_final_response().output_parsed == REPORT

    async with live_server(say(WRITTEN)) as live:
        await asyncio.to_thread(converse, live.url)
        await live.until_idle()
