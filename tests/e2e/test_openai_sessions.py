"""What the official Python client builds on responses: sessions of lanes with an accumulator, and its tool runner."""

import asyncio
import re
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest
from doubles_http import MODEL, Live, answer_by, in_loop, live_server
from openai import AsyncOpenAI
from openai.lib.responses_tool_runner import AsyncRegisteredFunction, AsyncResponsesToolRunner
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketAccumulator,
    ResponsesWebSocketError,
    ResponsesWebSocketLimits,
)
from pydantic import BaseModel

MIB = 1 << 20
LIMITS = ResponsesWebSocketLimits(
    max_lanes=33, max_events_per_lane=4096, max_events=65536, max_bytes_per_lane=4 * MIB, max_bytes=64 * MIB
)
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


class ReadSensor(BaseModel):
    """Read the temperature of a city in degrees Celsius."""

    city: str


class ToFahrenheit(BaseModel):
    """Convert a temperature."""

    celsius: float


TOOLS = [openai.pydantic_responses_function_tool(kind) for kind in (ReadSensor, ToFahrenheit)]
RESULTS = {"ReadSensor": "21.5", "ToFahrenheit": "70.7"}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def look_convert_say(prompt: str) -> str:
    """Go through both tools for the city that the user named, and name it at the end."""
    city = re.findall(r"<\|im_start\|>user\nHow warm is it in (.*?)\?", prompt)[-1]
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt.rpartition("How warm")[2], re.DOTALL)
    steps = [
        f"I look at {city}.\n" + call("ReadSensor", f'{{"city": "{city}"}}'),
        call("ToFahrenheit", '{"celsius": 21.5}'),
        f"It is 70.7 degrees in {city}.",
    ]
    return steps[len(results)]


async def session_of(stack: AsyncExitStack, live: Live) -> AsyncResponsesWebSocketSession:
    client = await stack.enter_async_context(AsyncOpenAI(base_url=f"{live.url}/v1", api_key="any"))
    connection = await stack.enter_async_context(client.responses.connect())
    return await stack.enter_async_context(AsyncResponsesWebSocketSession(connection, limits=LIMITS))


async def converse(lane: Any, stream_id: str, city: str) -> list[str]:
    """Run one loop on a lane, each turn read through the accumulator; return what was said."""
    said: list[str] = []
    fields: dict[str, Any] = {"input": f"How warm is it in {city}?"}
    while True:
        await lane.send({"type": "response.create", "model": MODEL, "tools": TOOLS, "store": False, **fields})
        accumulator = ResponsesWebSocketAccumulator()
        while True:
            event = await lane.recv()
            assert event.stream_id == stream_id
            accumulator.add_event(event)
            if event.type in TERMINAL:
                break
        response = accumulator.get_final_response()
        details = accumulator.detailed_snapshot()
        assert [row["item"]["id"] for row in details["output"]] == [item.id for item in response.output]
        said.append(accumulator.snapshot().output_text)
        assert said[-1] == response.output_text
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return said
        fields = {
            "previous_response_id": response.id,
            "input": [
                {"type": "function_call_output", "call_id": item.call_id, "output": RESULTS[item.name]}
                for item in calls
            ],
        }


@in_loop
async def test_loops_of_two_tools_on_32_lanes_of_a_session() -> None:
    async with live_server(answer_by(look_convert_say)) as live, AsyncExitStack() as stack:
        session = await session_of(stack, live)
        names = {f"lane-{number}": f"City {number}" for number in range(32)}
        said = await asyncio.gather(*(converse(session.lane(name), name, city) for name, city in names.items()))
        assert said == [[f"I look at {city}.", "", f"It is 70.7 degrees in {city}."] for city in names.values()]


@in_loop
async def test_a_session_steers_and_reads_errors() -> None:
    def choose(prompt: str) -> str:
        return "Short." if "Be short." in prompt else "and on " * 300

    async with live_server(answer_by(choose), step_time_s=0.002) as live, AsyncExitStack() as stack:
        session = await session_of(stack, live)
        lane = session.lane("a")
        await lane.send({"type": "response.create", "model": MODEL, "input": "Talk."})
        created = await lane.recv()
        await lane.send({"type": "response.steer", "previous_response_id": created.response.id, "input": "Be short."})
        seen = [created]
        while seen[-1].type != "response.completed":
            seen.append(await lane.recv())
        ended = [event for event in seen if event.type in ("response.steer.accepted", *TERMINAL)]
        assert [event.type for event in ended] == ["response.steer.accepted", "response.incomplete", TERMINAL[0]]
        assert ended[-1].response.output_text == "Short."
        assert ended[-1].response.previous_response_id == created.response.id
        other = session.lane("b")
        await other.send({"type": "response.create", "model": MODEL, "input": "x", "previous_response_id": "resp_none"})
        with pytest.raises(ResponsesWebSocketError) as missing:
            await other.get_final_response()
        assert missing.value.event.error.code == "previous_response_not_found"


@in_loop
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("store", [False, True], ids=["", "stored"])
async def test_the_tool_runner_runs_a_loop(stream: bool, store: bool) -> None:
    done: list[BaseModel] = []

    async def execute(arguments: BaseModel) -> str:
        done.append(arguments)
        return RESULTS[type(arguments).__name__]

    functions = [AsyncRegisteredFunction.from_tool(tool, execute=execute) for tool in TOOLS]
    async with (
        live_server(answer_by(look_convert_say)) as live,
        AsyncOpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client,
    ):
        response = await AsyncResponsesToolRunner(functions=functions).run(
            client,
            {"model": MODEL, "input": "How warm is it in Plze\u0148?", "store": store},
            stream=stream,
            max_steps=5,
        )
        assert response.output_text == "It is 70.7 degrees in Plze\u0148."
        assert done == [ReadSensor(city="Plze\u0148"), ToFahrenheit(celsius=21.5)]
