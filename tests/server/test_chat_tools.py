"""Tools and reasoning in /v1/chat/completions: shapes, streams that add up, and ends that hide nothing."""

import asyncio
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from doubles_http import LIMITS, MODEL, demo_tokenizer, events, in_loop, live_server, raw_post, say
from doubles_parsing import TOOLS, cuts
from doubles_tokenizer import make_tokenizer_with_markers
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from aserve.errors import ClientError
from aserve.parsing.answer_reader import AnswerReader
from aserve.parsing.registry import AnswerFormat
from aserve.request import FinishReason, RequestOutput
from aserve.server.answer_head import AnswerHead
from aserve.server.completions.chat_frames import ChatFrames
from aserve.server.completions.chat_tools import read_tool_options
from aserve.server.logprobs import TokenNames
from aserve.server.reasoning import read_effort, reasoning_variables
from aserve.server.schema import parse_chat
from aserve.server.usage import UsageTally

DEMO_TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
CITY = {"city": 'Pra } gue "\n😀', "days": 3}
CALLS = [("get_weather", CITY), ("get_time", {})]
CALLING = (
    f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(CITY, ensure_ascii=False)}}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
THINKING = f"<think>\nHm, the weather.\n</think>\n\n{CALLING}"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
THINK = {"reasoning_parser": "think"}


def whole(answer: dict[str, Any], choice: int = 0) -> dict[str, Any]:
    """Return message and finish reason of one choice, checked with the official type, without the calls' ids."""
    parsed = ChatCompletion.model_validate(answer, strict=True).choices[choice]
    return stripped(parsed)


def accumulated(chunks: list[dict[str, Any]]) -> ChatCompletion:
    """Return what the official client makes of a stream; each call must begin once."""
    state = ChatCompletionStreamState()
    begun = set()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                key = (choice["index"], call["index"])
                is_first = key not in begun
                assert ("id" in call, "name" in call["function"], "type" in call) == (is_first,) * 3
                begun.add(key)
    return state.current_completion_snapshot


def stripped(choice: Any) -> dict[str, Any]:
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    ids = [call.id for call in message.tool_calls or ()]
    assert len(set(ids)) == len(ids)
    extra = message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    return {
        "content": message.content or "",
        "calls": calls,
        "reasoning": extra.get("reasoning"),
        "finish_reason": choice.finish_reason,
    }


def parsed_calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in message["calls"]]


@in_loop
async def test_calls_have_the_official_shape() -> None:
    async with live_server(say(CALLING)) as live:
        answer = (await live.chat(tools=DEMO_TOOLS)).json()
        message = whole(answer)
        assert message["content"] == "Let me see."
        assert parsed_calls(message) == CALLS
        assert message["finish_reason"] == "tool_calls"
        assert "reasoning" not in answer["choices"][0]["message"]
        call = answer["choices"][0]["message"]["tool_calls"][0]
        assert call.keys() == {"id", "type", "function"}
        assert call["id"].startswith("call_")
        chunks = events((await live.chat(tools=DEMO_TOOLS, **STREAM)).text)
        assert stripped(accumulated(chunks).choices[0]) == message
        assert {**chunks[-1]["usage"], "prompt_tokens_details": None} == {
            **answer["usage"],
            "prompt_tokens_details": None,
        }
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert ends == [None] * (len(ends) - 1) + ["tool_calls"]
        await live.until_idle()


@in_loop
async def test_an_answer_that_is_nothing_but_calls_has_no_content() -> None:
    only = CALLING.removeprefix("Let me see.\n")
    async with live_server(say(only)) as live:
        message = (await live.chat(tools=DEMO_TOOLS)).json()["choices"][0]["message"]
        assert message["content"] is None
        chunks = events((await live.chat(tools=DEMO_TOOLS, stream=True)).text)
        assert "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]) == ""


def num_reasoning_tokens(answer: str) -> int:
    """Count the tokens of ``answer`` with a character between the two tags."""
    begin, end = answer.index("<think>") + len("<think>"), answer.index("</think>")
    place = count = 0
    for token in demo_tokenizer().encode(answer):
        start, place = place, place + len(demo_tokenizer().decode([token]))
        count += start < end and place > begin
    return count


@in_loop
async def test_reasoning_comes_under_both_names_and_is_counted() -> None:
    async with live_server(say(THINKING), **THINK) as live:
        answer = (await live.chat(tools=DEMO_TOOLS)).json()
        message = whole(answer)
        assert message["reasoning"] == "Hm, the weather."
        assert parsed_calls(message) == CALLS
        chunks = events((await live.chat(tools=DEMO_TOOLS, **STREAM)).text)
        assert stripped(accumulated(chunks).choices[0]) == message
        for usage in (answer["usage"], chunks[-1]["usage"]):
            assert usage["completion_tokens_details"]["reasoning_tokens"] == num_reasoning_tokens(THINKING)
        alone = whole((await live.chat()).json())  # without tools calls are text
        assert (alone["content"], alone["reasoning"]) == (CALLING, "Hm, the weather.")
        assert alone["finish_reason"] == "stop"


@in_loop
async def test_a_length_is_never_hidden() -> None:
    ids = demo_tokenizer().encode(THINKING)
    async with live_server(say(THINKING), **THINK) as live:

        async def both(max_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
            fields = {"tools": DEMO_TOOLS, "max_tokens": max_tokens}
            plain = whole((await live.chat(**fields)).json())
            return plain, stripped(accumulated(events((await live.chat(**fields, stream=True)).text)).choices[0])

        answers = await asyncio.gather(*(both(count) for count in range(1, len(ids) + 2)))
        for count, (plain, streamed) in enumerate(answers, start=1):
            assert plain == streamed, count
            assert plain["finish_reason"] == ("tool_calls" if count > len(ids) else "length")
            for name, arguments in plain["calls"][:-1]:
                assert json.loads(arguments) == dict(CALLS)[name]
        await live.until_idle()


@in_loop
async def test_a_stop_string_within_a_call_makes_it_no_call_to_act_on() -> None:
    async with live_server(say(CALLING)) as live:
        for stop, calls, reason in (
            ("</tool_call>", CALLS[:1], "tool_calls"),
            ("gue", None, "stop"),
            ("see", [], "stop"),
        ):
            fields = {"tools": DEMO_TOOLS, "stop": stop}
            plain = whole((await live.chat(**fields)).json())
            streamed = stripped(accumulated(events((await live.chat(**fields, stream=True)).text)).choices[0])
            assert plain == streamed
            assert plain["finish_reason"] == reason
            if calls is None:
                ((name, arguments),) = plain["calls"]
                assert (name, arguments) == ("get_weather", '{"city": "Pra } ')
            else:
                assert parsed_calls(plain) == calls


def frames_of(pieces: list[str], **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of an answer that arrives in ``pieces``."""
    body = {"messages": [{"role": "user", "content": "hi"}], **STREAM, **fields}
    options = parse_chat(body, 49152)[1]
    parser = AnswerFormat("hermes", "think").parser(TOOLS)
    assert parser is not None
    head = AnswerHead("chatcmpl", "chat.completion.chunk", MODEL, options, UsageTally(1))
    builder = ChatFrames(head, 0, TokenNames(demo_tokenizer(), hides_special=True), AnswerReader(parser))
    text = b""
    for place, piece in enumerate(pieces):
        reason = FinishReason.STOP if place == len(pieces) - 1 else None
        text += b"".join(builder.frames(RequestOutput("r", piece, [5], 9, place + 1, 0, reason)))
    return events((text + b"data: [DONE]\n\n").decode())


def test_a_stream_adds_up_to_the_same_however_the_answer_is_cut() -> None:
    expected = {
        "content": "Let me see.",
        "calls": [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in CALLS],
        "reasoning": "Hm, the weather.",
        "finish_reason": "tool_calls",
    }
    for pieces in cuts(THINKING):
        assert stripped(accumulated(frames_of(pieces)).choices[0]) == expected, pieces


@in_loop
async def test_choices_each_have_calls_of_their_own() -> None:
    async with live_server(say(CALLING)) as live:
        streamed = accumulated(events((await live.chat(tools=DEMO_TOOLS, n=3, **STREAM)).text))
        plain = (await live.chat(tools=DEMO_TOOLS, n=3)).json()
        for choice in range(3):
            assert parsed_calls(stripped(streamed.choices[choice])) == CALLS
            assert whole(plain, choice) == stripped(streamed.choices[choice])
        ids = [call["id"] for one in plain["choices"] for call in one["message"]["tool_calls"]]
        assert len(set(ids)) == 6


@in_loop
async def test_log_probabilities_cover_every_token() -> None:
    async with live_server(say(THINKING), **THINK) as live:
        fields = {"tools": DEMO_TOOLS, "logprobs": True, "top_logprobs": 1}
        plain = (await live.chat(**fields)).json()
        entries = plain["choices"][0]["logprobs"]["content"]
        assert len(entries) == plain["usage"]["completion_tokens"]
        shown = b"".join(bytes(entry["bytes"] or ()) for entry in entries)
        assert shown.decode() == THINKING
        chunks = events((await live.chat(**fields, stream=True)).text)
        logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
        assert [entry for one in logprobs for entry in one["content"]] == entries


@in_loop
async def test_where_there_is_no_tool_there_is_no_call() -> None:
    async with live_server(say(CALLING)) as live:
        plain = whole((await live.chat()).json())
        assert (plain["content"], plain["calls"], plain["finish_reason"]) == (CALLING, [], "stop")
        for fields in (
            {"tools": []},
            {"tools": None},
            {"tools": DEMO_TOOLS, "tool_choice": "none"},
            {"tool_choice": "auto"},
            {"tool_choice": None, "parallel_tool_calls": False},
        ):
            for stream in (False, True):
                answer = await live.chat(stream=stream, **fields)
                assert answer.status_code == 200, answer.text
                message = stripped(accumulated(events(answer.text)).choices[0]) if stream else whole(answer.json())
                assert message == plain


@in_loop
async def test_one_call_at_most_where_calls_are_not_parallel() -> None:
    async with live_server(say(CALLING)) as live:
        message = whole((await live.chat(tools=DEMO_TOOLS, parallel_tool_calls=False)).json())
        assert parsed_calls(message) == CALLS[:1]


@in_loop
async def test_tools_are_told_to_the_model_and_results_come_back() -> None:
    turn = {"role": "user", "content": "The weather?"}
    arguments = json.dumps(CITY)
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    async with live_server(say("It is fine.")) as live:

        async def prompt(*messages: dict[str, Any], **fields: Any) -> str:
            answer = await live.post("/v1/chat/completions", messages=messages, max_tokens=50, **fields)
            assert answer.status_code == 200, answer.text
            tokenized = await live.post("/tokenize", messages=messages, tools=fields.get("tools"))
            assert tokenized.json()["count"] == answer.json()["usage"]["prompt_tokens"]
            return demo_tokenizer().decode(tokenized.json()["tokens"], skip_special_tokens=False)

        told = await prompt(turn, tools=DEMO_TOOLS)
        assert all(name in told and json.dumps(name) in told for name in TOOLS)
        assert "get_time" not in await prompt(turn)
        result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Sunny."}]}
        asked = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."}
        history = await prompt(turn, asked, result, tools=DEMO_TOOLS)
        assert "Sunny." in history
        assert "None" not in history
        assert "Pra } gue" in history


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": "x"}, "tools"),
    ({"tools": [5]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [*DEMO_TOOLS, {"type": "function"}]}, "tools[2].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [*DEMO_TOOLS, DEMO_TOOLS[0]]}, "tools"),
    ({"tools": DEMO_TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": DEMO_TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": DEMO_TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
    ({"tools": DEMO_TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tools": DEMO_TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": DEMO_TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (
        {"tools": DEMO_TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [], "mode": "x"}}},
        "tool_choice.allowed_tools.mode",
    ),
    (  # openai.types.chat.ChatCompletionAllowedToolsParam: "auto" or "required"
        {"tools": DEMO_TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [], "mode": "none"}}},
        "tool_choice.allowed_tools.mode",
    ),
    (
        {"tools": DEMO_TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
        "tool_choice.allowed_tools.tools",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
    ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
    ({"reasoning": "high"}, "reasoning"),
]


@in_loop
async def test_what_is_wrong_with_tools_is_told_before_the_200() -> None:
    async with live_server() as live:
        for (fields, param), stream in itertools.product(WRONG, (False, True)):
            answer = await live.chat(stream=stream, **fields)
            assert answer.status_code == 400, fields
            assert answer.json()["error"]["param"] == param
        assert live.engine.metrics.num_steps == 0
        await live.check_alive()


@in_loop
async def test_any_parameters_leave_the_server_alive() -> None:
    loop: dict[str, Any] = {"$ref": "#"}
    bomb = {"type": "object", "properties": {"a": {"enum": [f"value {n}" for n in range(400)]}}}
    deep: Any = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    wrong = [
        True,
        [],
        "",
        {"type": "frob"},
        loop,
        {"enum": []},
        {"type": "string", "pattern": "["},
        bomb,
        deep,
        {"a": 1},
    ]
    async with live_server(say("Hello")) as live:
        for parameters in [*wrong, None]:
            tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
            for choice in ("auto", "required"):
                answer = await live.chat(tools=tools, tool_choice=choice)
                assert answer.status_code in (200, 400)
                assert answer.status_code == 200 or answer.json()["error"]["param"].startswith("tools"), answer.text
        await live.check_alive()


@pytest.mark.parametrize(
    "schema", [{"type": "frob"}, {"$ref": "#/nope"}, {"minimum": 5, "maximum": 1, "type": "integer"}]
)
@in_loop
async def test_parameters_that_cannot_be_enforced_are_refused_only_where_they_must_be(schema: Any) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
    tools = [{"type": "function", "function": function}]
    async with live_server(say("Hello")) as live:
        assert whole((await live.chat(tools=tools)).json())["content"] == "Hello"
        strict = [{"type": "function", "function": {**function, "strict": True}}]
        for fields in ({"tools": tools, "tool_choice": "required"}, {"tools": strict}):
            answer = await live.chat(**fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text
        await live.check_alive()


@in_loop
async def test_a_client_that_leaves_within_a_call_ends_it() -> None:
    endless = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "' + "x" * 5000
    async with live_server(say(endless), step_time_s=0.001) as live:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": DEMO_TOOLS, "stream": True}
        async with raw_post(live, "/v1/chat/completions", body) as (reader, _):
            await reader.readuntil(b'"arguments":"x')
        await live.until_idle()


def test_effort_becomes_the_variables_that_templates_know() -> None:
    assert reasoning_variables(None, "reasoning_effort") == {}
    assert reasoning_variables("low", "x") == {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
    assert reasoning_variables("none", "x")["enable_thinking"] is False
    with pytest.raises(ClientError, match="x must be one of none, minimal"):
        reasoning_variables("some", "x")
    for reasoning, effort in (({"effort": "high"}, "high"), ({"enabled": False, "effort": "low"}, "none")):
        assert read_effort(None, reasoning) == reasoning_variables(effort, "x")
    assert read_effort("low", {"effort": "high"}) == reasoning_variables("low", "x")
    assert read_effort(None, {"enabled": True}) == {}


@in_loop
async def test_effort_reaches_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}/{{ reasoning_effort }}/{{ enable_thinking }}"
    tokenizer = make_tokenizer_with_markers(tmp_path, template, [])
    limits = dataclasses.replace(LIMITS, vocab_size=tokenizer.vocab_size)
    async with live_server(lambda tokens, position: 257, limits=limits, tokenizer=tokenizer) as live:

        async def prompt(**fields: Any) -> int:
            return int((await live.chat(**fields)).json()["usage"]["prompt_tokens"])

        assert await prompt() == len("hi//")
        assert await prompt(reasoning_effort="high") == len("hi/high/True")
        assert await prompt(reasoning={"effort": "none"}) == len("hi/none/False")
        kwargs = {"enable_thinking": "no"}
        assert await prompt(reasoning_effort="high", chat_template_kwargs=kwargs) == len("hi/high/no")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["function", "auto", "required", "f", "a b", "none"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "parameters", "mode", "tools"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=3), JSON)
def test_any_tools_are_taken_or_refused_by_name(tools: Any, tool_choice: Any) -> None:
    param = "tools"
    try:
        read_tool_options(tools, tool_choice, is_parallel=True)
    except ClientError as error:
        param = error.param or ""
    assert param.startswith(("tools", "tool_choice"))
