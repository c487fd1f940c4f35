"""openai-agents against a live server: loops of two tools over one socket, over HTTP responses and over chat."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    FunctionTool,
    ModelSettings,
    RunConfig,
    Runner,
    function_tool,
    handoff,
    set_default_openai_api,
    set_default_openai_responses_transport,
    set_tracing_disabled,
)
from agents.models.multi_provider import MultiProvider
from agents.models.openai_responses import ResponsesWebSocketError
from doubles_http import LIMITS, MODEL, Live, answer_by, demo_tokenizer, in_loop, live_server
from openai import AsyncOpenAI
from pydantic import BaseModel

Transport = Literal["websocket", "http", "chat"]
TRANSPORTS: tuple[Transport, ...] = ("websocket", "http", "chat")
QUESTION = "How warm is it in Plze\u0148?"
CALLS = [
    '<tool_call>\n{"name": "read_sensor", "arguments": {"city": "Plze\u0148"}}\n</tool_call>',
    '<tool_call>\n{"name": "to_fahrenheit", "arguments": {"celsius": 21.5}}\n</tool_call>',
]
REPORT = '{"city": "Plze\u0148", "fahrenheit": 70.7}'


@pytest.fixture(autouse=True)
def keep_defaults() -> Any:
    """The client keeps its transport, its API and its tracing in the process."""
    set_tracing_disabled(True)
    yield
    set_default_openai_api("responses")
    set_default_openai_responses_transport("http")


class Report(BaseModel):
    city: str
    fahrenheit: float


def look_convert_report(prompt: str) -> str:
    """Call one tool, then the other with what the first gave back, then report."""
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
    assert results == ["21.5", "70.7"][: len(results)]
    return [*CALLS, REPORT][len(results)]


@dataclass
class Thermometer:
    """Two tools that keep what they were called with, and which sockets were open then."""

    live: Live
    calls: list[tuple[str, Any]] = field(default_factory=list)
    sockets: list[frozenset[int]] = field(default_factory=list)

    def tools(self) -> list[FunctionTool]:
        @function_tool
        def read_sensor(city: str) -> float:
            """Read the temperature of a city in degrees Celsius."""
            return float(self._note("read_sensor", city, 21.5))

        @function_tool
        def to_fahrenheit(celsius: float) -> float:
            """Convert a temperature."""
            return float(self._note("to_fahrenheit", celsius, 70.7))

        return [read_sensor, to_fahrenheit]

    def _note(self, name: str, argument: Any, result: float) -> float:
        self.calls.append((name, argument))
        self.sockets.append(frozenset(map(id, self.live.state._connections)))
        return result


@asynccontextmanager
async def client(live: Live, transport: Transport) -> AsyncIterator[RunConfig]:
    """Choose the transport as the client's documentation says, and close its sockets at the end."""
    set_default_openai_api("chat_completions" if transport == "chat" else "responses")
    set_default_openai_responses_transport("websocket" if transport == "websocket" else "http")
    async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as openai:
        provider = MultiProvider(openai_client=openai)
        yield RunConfig(model_provider=provider)
        await provider.aclose()


async def run(agent: Agent, config: RunConfig, *, is_streamed: bool, **options: Any) -> Any:
    """Return the result of a run, all of whose events have been read."""
    if not is_streamed:
        return await Runner.run(agent, QUESTION, run_config=config, **options)
    result = Runner.run_streamed(agent, QUESTION, run_config=config, **options)
    async for _ in result.stream_events():
        pass
    return result


def thermometer_agent(thermometer: Thermometer, **options: Any) -> Agent:
    return Agent(name="Thermometer", instructions="Be exact.", model=MODEL, tools=thermometer.tools(), **options)


@in_loop
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_loop_of_two_tools_ends_with_a_report(transport: Transport, is_streamed: bool) -> None:
    prompts: list[str] = []

    def choose(prompt: str) -> str:
        prompts.append(prompt)
        return look_convert_report(prompt)

    async with live_server(answer_by(choose)) as live, client(live, transport) as config:
        thermometer = Thermometer(live)
        agent = thermometer_agent(thermometer, output_type=Report, model_settings=ModelSettings(include_usage=True))
        result = await run(agent, config, is_streamed=is_streamed)
        assert result.final_output == Report(city="Plze\u0148", fahrenheit=70.7)
        assert thermometer.calls == [("read_sensor", "Plze\u0148"), ("to_fahrenheit", 21.5)]
        kinds = [item.type for item in result.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item"] * 2 + ["message_output_item"]
        first, second = thermometer.sockets
        assert first == second
        assert len(first) == (transport == "websocket")
        check_usage(result.context_wrapper.usage, prompts)


def check_usage(usage: Any, prompts: list[str]) -> None:
    """The client adds up the usage of three requests; only the ends of prompts and the answers are computed."""
    tokenizer = demo_tokenizer()
    num_prompt = [len(tokenizer.encode(prompt)) for prompt in prompts]
    num_spoken = [len(tokenizer.encode(text)) + 1 for text in (*CALLS, REPORT)]  # and the end
    assert (usage.requests, usage.input_tokens, usage.output_tokens) == (3, sum(num_prompt), sum(num_spoken))
    num_cached = sum(num_prompt[:2])  # at least the prompt before
    assert num_cached - 2 * LIMITS.page_size <= usage.input_tokens_details.cached_tokens < sum(num_prompt[1:])


@in_loop
@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_a_loop_by_response_ids_sends_new_items_only(transport: Transport) -> None:
    async with live_server(answer_by(look_convert_report)) as live, client(live, transport) as config:
        thermometer = Thermometer(live)
        agent = thermometer_agent(thermometer, model_settings=ModelSettings(store=True))
        result = await run(agent, config, is_streamed=True, auto_previous_response_id=True)
        assert result.final_output == REPORT
        again = await Runner.run(agent, "And now?", run_config=config, previous_response_id=result.last_response_id)
        assert again.final_output == REPORT  # it sees both results, though the client sent neither of them again
        assert [name for name, _ in thermometer.calls] == ["read_sensor", "to_fahrenheit"]


@in_loop
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_calls_side_by_side_and_forced(transport: Transport) -> None:
    def choose(prompt: str) -> str:
        if "<tool_response>\n" not in prompt:
            return "\n".join(CALLS)
        return "Done."

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=True, max_tokens=200, temperature=0.5)
    async with live_server(answer_by(choose)) as live, client(live, transport) as config:
        thermometer = Thermometer(live)
        result = await run(thermometer_agent(thermometer, model_settings=settings), config, is_streamed=True)
        assert result.final_output == "Done."
        assert sorted(thermometer.calls) == [("read_sensor", "Plze\u0148"), ("to_fahrenheit", 21.5)]


@in_loop
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_agent_hands_over_to_another(transport: Transport) -> None:
    def choose(prompt: str) -> str:
        if "Answer in Czech." in prompt:
            return "Dobr\u00fd den."
        return '<tool_call>\n{"name": "transfer_to_czech", "arguments": {}}\n</tool_call>'

    async with live_server(answer_by(choose)) as live, client(live, transport) as config:
        czech = Agent(name="Czech", instructions="Answer in Czech.", model=MODEL)
        desk = Agent(name="Desk", instructions="Hand over.", model=MODEL, handoffs=[handoff(czech)])
        result = await run(desk, config, is_streamed=False)
        assert result.final_output == "Dobr\u00fd den."
        assert result.last_agent is czech


@in_loop
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_run_that_is_cancelled_leaves_nothing(transport: Transport) -> None:
    async with live_server(step_time_s=0.002) as live, client(live, transport) as config:
        agent = Agent(name="Endless", model=MODEL, model_settings=ModelSettings(max_tokens=4000))
        result = Runner.run_streamed(agent, QUESTION, run_config=config)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                result.cancel()
        await live.until_idle()
        assert live.engine.stats().num_aborts == 1


@in_loop
async def test_an_error_on_the_socket_tells_its_code_and_the_socket_goes_on() -> None:
    async with live_server(answer_by(lambda prompt: "Hi.")) as live, client(live, "websocket") as config:
        agent = Agent(name="Any", model=MODEL)
        with pytest.raises(ResponsesWebSocketError) as missing:
            await Runner.run(agent, "hi", run_config=config, previous_response_id="resp_none")
        assert missing.value.code == "previous_response_not_found"
        assert (await Runner.run(agent, "hi", run_config=config)).final_output == "Hi."
