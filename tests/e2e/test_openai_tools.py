"""Loops of two tools with the official client, over HTTP and over ``responses.connect()``, on the demo's vocabulary."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from doubles_http import EOS, Turns, demo_tokenizer
from doubles_http import LIMITS as DEMO_LIMITS
from doubles_socket import MODEL, Live, in_loop, live_server, scripted_engine
from openai.types.responses import Response

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "Weather of a city.", "parameters": CITY},
    {"type": "custom", "name": "run", "description": "Run a program."},
]
REPLIES = [
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Plze\u0148"}}\n</tool_call>',
    '<tool_call>\n{"name": "run", "arguments": {"input": "print(\\"21\\")\\n"}}\n</tool_call>',
    "It is 21 degrees.",
]
RESULTS = {"get_weather": "sunny", "run": "21"}
QUESTION = "How warm is it?"


@asynccontextmanager
async def tool_server(device: Turns) -> AsyncIterator[tuple[Live, openai.AsyncOpenAI]]:
    async with (
        scripted_engine(device, limits=DEMO_LIMITS, tokenizer=demo_tokenizer()) as engine,
        live_server(engine) as live,
        openai.AsyncOpenAI(base_url=f"{live.http_url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield live, client


def answer_to(response: Response) -> dict[str, Any]:
    """Carry out the one call of ``response``."""
    (call,) = response.output
    if call.type == "custom_tool_call":
        assert call.input == 'print("21")\n'
        return {"type": "custom_tool_call_output", "call_id": call.call_id, "output": RESULTS[call.name]}
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Plze\u0148"}
    return {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[call.name]}


Ask = Callable[..., Awaitable[Response]]


async def run_loop(ask: Ask, *, is_stateful: bool) -> list[Response]:
    """Go through all turns, and return the responses."""
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    responses = [await ask(input=history)]
    while any(item.type != "message" for item in responses[-1].output):
        last = responses[-1]
        if is_stateful:
            responses.append(await ask(input=[answer_to(last)], previous_response_id=last.id))
        else:
            history += [item.to_dict(exclude_none=True) for item in last.output] + [answer_to(last)]
            responses.append(await ask(input=history, store=False))
    return responses


def check_loop(responses: list[Response], device: Turns, *, continues: bool) -> None:
    """Check the answer, and what the device saw: the calls and results as the template writes them."""
    assert [item.type for response in responses for item in response.output] == [
        "function_call",
        "custom_tool_call",
        "message",
    ]
    assert responses[-1].output_text == REPLIES[-1]
    tokenizer = demo_tokenizer()
    first, _, third = device.prompts
    shown = tokenizer.decode(third, skip_special_tokens=False)
    results = [f"<tool_response>\n{result}\n</tool_response>" for result in RESULTS.values()]
    assert shown == tokenizer.decode(first, skip_special_tokens=False) + "".join(
        f"{reply}<|im_end|>\n<|im_start|>user\n{result}<|im_end|>\n<|im_start|>assistant\n"
        for reply, result in zip(REPLIES, results, strict=False)
    )
    for turn, reply in enumerate(device.replies[:2]):
        so_far = [*device.prompts[turn], *reply, EOS]
        goes_on = device.prompts[turn + 1][: len(so_far)] == so_far
        assert goes_on is continues, "text is tokenized again only where its ids are not known"
        usage = responses[turn + 1].usage
        assert usage is not None
        known = len(so_far) if continues else len(device.prompts[turn])
        assert usage.input_tokens_details.cached_tokens >= known - 2 * DEMO_LIMITS.page_size


@in_loop
@pytest.mark.parametrize("is_stateful", [True, False], ids=["by id", "whole history"])
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
async def test_a_loop_over_http(is_stateful: bool, is_streamed: bool) -> None:
    device = Turns(REPLIES)
    async with tool_server(device) as (_, client):

        async def ask(**fields: Any) -> Response:
            if not is_streamed:
                return await client.responses.create(model=MODEL, tools=TOOLS, **fields)
            async with client.responses.stream(model=MODEL, tools=TOOLS, **fields) as stream:
                async for _ in stream:
                    pass
                return await stream.get_final_response()

        responses = await run_loop(ask, is_stateful=is_stateful)
    check_loop(responses, device, continues=is_stateful)


@in_loop
@pytest.mark.parametrize("store", [True, False], ids=["stored", "in the lane"])
async def test_a_loop_on_a_socket(store: bool) -> None:
    device = Turns(REPLIES)
    async with tool_server(device) as (_, client), client.responses.connect() as connection:

        async def ask(**fields: Any) -> Response:
            await connection.response.create(model=MODEL, tools=TOOLS, store=store, **fields)
            async for event in connection:
                if event.type in ("response.completed", "response.incomplete", "response.failed"):
                    return event.response
                assert event.type != "error", event
            raise AssertionError("the connection ended")

        responses = await run_loop(ask, is_stateful=True)
    check_loop(responses, device, continues=True)


@in_loop
async def test_calls_are_stored_and_listed() -> None:
    async with tool_server(Turns(REPLIES)) as (_, client):

        async def ask(**fields: Any) -> Response:
            return await client.responses.create(model=MODEL, tools=TOOLS, **fields)

        responses = await run_loop(ask, is_stateful=True)
        for response in responses:
            assert (await client.responses.retrieve(response.id)).output == response.output
        kinds = [[item.type for item in (await client.responses.input_items.list(r.id)).data] for r in responses]
        assert kinds == [["message"], ["function_call_output"], ["custom_tool_call_output"]]
