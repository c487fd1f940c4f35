"""LangChain's ChatOpenAI against a live server, over chat completions and over responses."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any

import openai
import pytest
from doubles_http import LIMITS, MODEL, Live, answer_by, demo_tokenizer, in_loop, live_server, say
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

over_both = pytest.mark.parametrize("use_responses_api", [False, True], ids=["chat", "responses"])
REPLY = "Dobr\u00fd den, \U0001f600 world!"
CALLS = [
    '<tool_call>\n{"name": "read_sensor", "arguments": {"city": "Plze\u0148"}}\n</tool_call>',
    '<tool_call>\n{"name": "to_fahrenheit", "arguments": {"celsius": 21.5}}\n</tool_call>',
]
REPORT = '{"city": "Plze\u0148", "fahrenheit": 70.7}'


class Report(BaseModel):
    """How warm it is."""

    city: str
    fahrenheit: float


@tool
def read_sensor(city: str) -> str:
    """Read the temperature of a city in degrees Celsius."""
    assert city == "Plze\u0148"
    return "21.5"


@tool
def to_fahrenheit(celsius: float) -> str:
    """Convert a temperature."""
    assert celsius == 21.5
    return "70.7"


TOOLS = {"read_sensor": read_sensor, "to_fahrenheit": to_fahrenheit}


@asynccontextmanager
async def chat_model(live: Live, **options: Any) -> AsyncIterator[ChatOpenAI]:
    own_clients = {  # those it makes itself are kept by address, so that a port used again finds a closed one
        "http_client": openai.DefaultHttpxClient(),
        "http_async_client": openai.DefaultAsyncHttpxClient(),
    }
    options = {"stream_usage": True, **own_clients, **options}
    model = ChatOpenAI(model=MODEL, base_url=f"{live.url}/v1", api_key="any", max_retries=0, **options)
    try:
        yield model
    finally:
        await model.root_async_client.close()
        model.root_client.close()


async def joined(stream: AsyncIterator[AIMessageChunk]) -> AIMessageChunk:
    """Return the sum of all chunks, as the library's users build it."""
    return reduce(add, [chunk async for chunk in stream])


@in_loop
@over_both
async def test_answers_and_their_usage(use_responses_api: bool) -> None:
    messages = [SystemMessage("Be kind."), HumanMessage([{"type": "text", "text": "hi"}])]
    async with live_server(say(REPLY)) as live, chat_model(live, use_responses_api=use_responses_api) as model:
        whole = await model.ainvoke(messages)
        in_thread = await asyncio.to_thread(model.invoke, messages)
        streamed = await joined(model.astream(messages))
        num_prompt = len(
            demo_tokenizer().encode_chat([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}])
        )
        num_spoken = len(demo_tokenizer().encode(REPLY)) + 1  # and the end
        for answer in (whole, in_thread, streamed):
            assert answer.text == REPLY
            usage = answer.usage_metadata
            assert usage is not None
            assert (usage["input_tokens"], usage["output_tokens"]) == (num_prompt, num_spoken)
            assert usage["total_tokens"] == num_prompt + num_spoken
            ended = answer.response_metadata.get("finish_reason") or answer.response_metadata["status"]
            assert ended == ("completed" if use_responses_api else "stop")
            assert answer.response_metadata["model_name"] == MODEL
        assert streamed.usage_metadata is not None
        assert streamed.usage_metadata["input_token_details"]["cache_read"] == num_prompt // LIMITS.page_size * 16
        await live.until_idle()


def look_convert_say(prompt: str) -> str:
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
    assert results == ["21.5", "70.7"][: len(results)]
    return ["I look.\n" + CALLS[0], CALLS[1], "It is 70.7 degrees."][len(results)]


async def run_loop(model: Any, *, is_streamed: bool) -> list[BaseMessage]:
    """Ask and carry out calls until there are none."""
    messages: list[BaseMessage] = [HumanMessage("How warm is it?")]
    while True:
        answer = await (joined(model.astream(messages)) if is_streamed else model.ainvoke(messages))
        messages.append(answer)
        if not answer.tool_calls:
            return messages
        messages += [await TOOLS[call["name"]].ainvoke(call) for call in answer.tool_calls]


def check_loop(messages: list[BaseMessage]) -> None:
    answers = [message for message in messages if isinstance(message, AIMessage)]
    assert [[(call["name"], call["args"]) for call in answer.tool_calls] for answer in answers] == [
        [("read_sensor", {"city": "Plze\u0148"})],
        [("to_fahrenheit", {"celsius": 21.5})],
        [],
    ]
    assert not any(answer.invalid_tool_calls for answer in answers)
    results = [message for message in messages if isinstance(message, ToolMessage)]
    assert [result.tool_call_id for result in results] == [answer.tool_calls[0]["id"] for answer in answers[:2]]
    assert [answer.text for answer in answers] == ["I look.", "", "It is 70.7 degrees."]


@in_loop
@over_both
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [None, True], ids=["", "strict"])
async def test_a_loop_of_bound_tools(use_responses_api: bool, is_streamed: bool, strict: bool | None) -> None:
    async with (
        live_server(answer_by(look_convert_say)) as live,
        chat_model(live, use_responses_api=use_responses_api) as model,
    ):
        bound = model.bind_tools(list(TOOLS.values()), strict=strict, parallel_tool_calls=False)
        check_loop(await run_loop(bound, is_streamed=is_streamed))


@in_loop
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_loop_by_response_ids(is_streamed: bool) -> None:
    prompts: list[str] = []

    def choose(prompt: str) -> str:
        prompts.append(prompt)
        return look_convert_say(prompt)

    async with (
        live_server(answer_by(choose)) as live,
        chat_model(live, use_previous_response_id=True, output_version="responses/v1") as model,
    ):
        check_loop(await run_loop(model.bind_tools(list(TOOLS.values())), is_streamed=is_streamed))
    for reply, (before, after) in zip(("I look.\n" + CALLS[0], CALLS[1]), pairwise(prompts), strict=True):
        assert after.startswith(f"{before}{reply}<|im_end|>"), "what was said goes on to the letter"


@in_loop
@over_both
async def test_calls_side_by_side_and_forced(use_responses_api: bool) -> None:
    async with (
        live_server(say("\n".join(CALLS))) as live,
        chat_model(live, use_responses_api=use_responses_api) as model,
    ):
        both = [("read_sensor", {"city": "Plze\u0148"}), ("to_fahrenheit", {"celsius": 21.5})]
        for choice in ("any", "auto"):
            bound = model.bind_tools(list(TOOLS.values()), tool_choice=choice)
            for answer in (await bound.ainvoke("hi"), await joined(bound.astream("hi"))):
                assert [(call["name"], call["args"]) for call in answer.tool_calls] == both
    async with live_server(say(CALLS[0])) as live, chat_model(live, use_responses_api=use_responses_api) as model:
        answer = await model.bind_tools(list(TOOLS.values()), tool_choice="read_sensor").ainvoke("hi")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == both[:1]


@in_loop
@over_both
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the library's, about its own parsed messages
async def test_structured_output(use_responses_api: bool) -> None:
    report = Report(city="Plze\u0148", fahrenheit=70.7)
    async with live_server(say(REPORT)) as live, chat_model(live, use_responses_api=use_responses_api) as model:
        structured = model.with_structured_output(Report)
        assert await structured.ainvoke("hi") == report
        assert [part async for part in structured.astream("hi")][-1] == report
        strict = model.with_structured_output(Report, method="json_schema", strict=True, include_raw=True)
        answer = await strict.ainvoke("hi")
        assert answer["parsed"] == report
        assert (answer["parsing_error"], answer["raw"].text) == (None, REPORT)
        by_schema = model.with_structured_output(Report.model_json_schema(), method="json_schema")
        assert await by_schema.ainvoke("hi") == report.model_dump()
        assert await model.with_structured_output(Report, method="json_mode").ainvoke("hi") == report
    call = f'<tool_call>\n{{"name": "Report", "arguments": {REPORT}}}\n</tool_call>'
    async with live_server(say(call)) as live, chat_model(live, use_responses_api=use_responses_api) as model:
        assert await model.with_structured_output(Report, method="function_calling").ainvoke("hi") == report


@in_loop
async def test_structured_output_beside_tools() -> None:
    def choose(prompt: str) -> str:
        return REPORT if "<tool_response>\n" in prompt else CALLS[0]

    async with live_server(answer_by(choose)) as live, chat_model(live) as model:
        bound = model.bind_tools([read_sensor], response_format=Report, strict=True)
        *_, answer = await run_loop(bound, is_streamed=False)
        assert answer.additional_kwargs["parsed"] == Report(city="Plze\u0148", fahrenheit=70.7)


@in_loop
async def test_thoughts_of_a_loop_are_taken_back() -> None:
    """Reasoning items come in the content, and the client sends them back beside the calls."""

    def choose(prompt: str) -> str:
        return f"<think>I should look.</think>{look_convert_say(prompt)}"

    async with (
        live_server(answer_by(choose), reasoning_parser="think") as live,
        chat_model(live, reasoning={"effort": "low"}, output_version="responses/v1") as model,
    ):
        messages = await run_loop(model.bind_tools(list(TOOLS.values())), is_streamed=True)
        answers = [message for message in messages if isinstance(message, AIMessage)]
        assert [answer.text for answer in answers] == ["I look.", "", "It is 70.7 degrees."]
        for answer in answers:
            assert answer.content[0]["type"] == "reasoning"
            assert answer.usage_metadata is not None
            assert answer.usage_metadata["output_token_details"]["reasoning"] > 0


@in_loop
async def test_options_reach_the_model() -> None:
    options = {"logprobs": True, "top_logprobs": 2, "seed": 1, "n": 2, "frequency_penalty": 0.1, "logit_bias": {"5": 1}}
    async with live_server(say(REPLY)) as live, chat_model(live, temperature=0, **options) as model:
        answer = await model.ainvoke("hi", stop=["world"])
        assert answer.text == REPLY.partition("world")[0]
        entries = answer.response_metadata["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode().startswith(answer.text)
        (both,) = (await model.agenerate([[HumanMessage("hi")]])).generations
        assert [one.text for one in both] == [REPLY, REPLY]
        short = await model.ainvoke("hi", max_tokens=2, extra_body={"top_k": 5, "min_p": 0.1})
        assert short.response_metadata["finish_reason"] == "length"
        batch = await model.abatch(["a", "b"], {"max_concurrency": 2})
        assert [one.text for one in batch] == [REPLY, REPLY]


@in_loop
@over_both
async def test_errors_are_raised_as_the_library_knows_them(use_responses_api: bool) -> None:
    async with live_server(say(REPLY)) as live, chat_model(live, use_responses_api=use_responses_api) as model:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await model.ainvoke("hi", temperature=-1)
        with pytest.raises(ContextOverflowError):
            await model.ainvoke("long " * LIMITS.max_model_len)
        with pytest.raises(ContextOverflowError):
            await joined(model.astream("long " * LIMITS.max_model_len))


@in_loop
@over_both
async def test_leaving_a_stream_ends_its_request(use_responses_api: bool) -> None:
    async with (
        live_server(step_time_s=0.002) as live,
        chat_model(live, use_responses_api=use_responses_api, max_tokens=4000) as model,
    ):
        stream = model.astream("hi")
        async for _ in stream:
            break
        await stream.aclose()
        await live.until_idle()
        assert live.engine.stats().num_aborts == 1
