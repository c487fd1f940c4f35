"""What the fields of /v1/messages mean to the engine and to the template."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from doubles_messages import HI

from aserve.errors import ClientError
from aserve.request import GrammarSpec, SamplingParams
from aserve.server.messages.input import read_conversation
from aserve.server.messages.schema import MessagesRequest, parse_count, parse_message
from aserve.server.responses.schema import parse_create
from aserve.server.tools import FunctionTool, ToolOptions


def parse(**fields: Any) -> MessagesRequest:
    return parse_message({"messages": HI, "max_tokens": 5, **fields}, 256)


def test_fields_become_sampling_parameters() -> None:
    assert parse().params == SamplingParams(max_tokens=5)
    asked = parse(temperature=0.3, top_p=0.5, top_k=7, stop_sequences=["a", "b"], max_tokens=9)
    assert asked.params == SamplingParams(temperature=0.3, top_p=0.5, top_k=7, stop=("a", "b"), max_tokens=9)
    assert parse_count({"messages": HI}, 256).params == SamplingParams()


def test_further_sampling_fields_mean_what_they_mean_in_responses() -> None:
    extras = {
        "min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "logit_bias": {"3": 1}, "seed": 4, "stop_token_ids": [7], "ignore_eos": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    same = parse_create({"input": "a", "max_output_tokens": 5, **extras}, 256).params
    assert parse(**extras).params == same != SamplingParams(max_tokens=5)
    assert parse(priority=3).priority == 3


def test_output_config_holds_the_answer_to_a_schema() -> None:
    given = {"type": "json_schema", "schema": {"type": "object"}}
    assert parse(output_config={"format": given}).params.grammar == GrammarSpec("json_schema", '{"type":"object"}')
    assert parse(output_format=given).params.grammar == GrammarSpec("json_schema", '{"type":"object"}')
    assert parse(output_config={"effort": "high"}).params.grammar is None
    assert parse(regex="a+").params.grammar == GrammarSpec("regex", "a+")
    with pytest.raises(ClientError, match="cannot be combined"):
        parse(regex="a+", output_config={"format": given})


ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("thinking", "effort", "variables"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, None, ON),
        ({"type": "adaptive"}, "low", {"reasoning_effort": "low", **ON}),
        ({"type": "disabled"}, None, OFF),
        ({"type": "disabled"}, "max", {"reasoning_effort": "max", **OFF}),
        ({"type": "between_tools"}, None, {}),
        (None, "high", {"reasoning_effort": "high", **ON}),
        (None, None, {}),
    ],
)
def test_thinking_and_effort_are_variables_of_the_template(
    thinking: dict[str, Any] | None, effort: str | None, variables: dict[str, Any]
) -> None:
    fields = {"thinking": thinking, "output_config": {"effort": effort}}
    assert parse(**fields).template_kwargs == variables
    own = {"enable_thinking": "own", "thinking": "own", "reasoning_effort": "own", "x": 1}
    assert parse(**fields, chat_template_kwargs=own).template_kwargs == own


def test_thinking_is_shown_unless_it_is_to_be_omitted() -> None:
    for display in ("summarized", None):
        assert parse(thinking={"type": "adaptive", "display": display}).shows_thinking
    assert not parse(thinking={"type": "adaptive", "display": "omitted"}).shows_thinking


SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = {"name": "look", "description": "Look.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
WAIT = {"type": "custom", "name": "wait", "input_schema": {"type": "object"}, "strict": True}


def test_tools_become_functions() -> None:
    tools = parse(tools=[LOOK, WAIT]).tools
    assert tools.tools == (
        FunctionTool("look", "Look.", SCHEMA, False),
        FunctionTool("wait", None, {"type": "object"}, True),
    )
    assert (tools.choice, tools.allowed, tools.is_parallel) == ("auto", None, True)
    assert parse(tools=[]).tools == parse().tools == ToolOptions()


@pytest.mark.parametrize(
    ("tool_choice", "choice", "allowed"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any"}, "required", None),
        ({"type": "tool", "name": "wait"}, "required", {"wait"}),
        ({"type": "none"}, "none", None),
    ],
)
def test_a_tool_choice_has_its_words_here(tool_choice: dict[str, Any], choice: str, allowed: set[str] | None) -> None:
    for is_single in (None, False, True):
        asked = {**tool_choice, "disable_parallel_tool_use": is_single}
        tools = parse(tools=[LOOK, WAIT], tool_choice=asked).tools
        assert (tools.choice, tools.allowed, tools.is_parallel) == (choice, allowed, not is_single)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_turns_of_one_role_are_joined_and_results_stand_alone() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"id_{name}", "name": name, "input": {"a": 1}}

    def result(name: str, **fields: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": f"id_{name}", **fields}

    made = read_conversation(
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "user", "content": [text("t"), text("wo")]},
            {"role": "assistant", "content": [text("I "), call("f"), text("look")]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, call("g")]},
            {"role": "user", "content": [result("f", content="4"), result("g"), text("and"), text(" now?")]},
            {"role": "user", "content": [result("f", content=[text("no "), text("way")], is_error=True)]},
            {"role": "user", "content": [result("g", content="Error 5", is_error=True)]},
            {"role": "system", "content": [text("quick")]},
        ],
        system=[text("be "), text("kind")],
    )

    def function(name: str) -> dict[str, Any]:
        return {"id": f"id_{name}", "type": "function", "function": {"name": name, "arguments": {"a": 1}}}

    assert made == [
        {"role": "system", "content": "be kind\n\nbe brief"},
        {"role": "user", "content": "one\n\ntwo"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "hm",
            "tool_calls": [function("f"), function("g")],
        },
        {"role": "tool", "tool_call_id": "id_f", "content": "4"},
        {"role": "tool", "tool_call_id": "id_g", "content": ""},
        {"role": "user", "content": "and now?"},
        {"role": "tool", "tool_call_id": "id_f", "content": "Error: no way"},
        {"role": "tool", "tool_call_id": "id_g", "content": "Error 5"},
        {"role": "system", "content": "quick"},
    ]


def test_a_line_for_the_bill_is_no_part_of_the_prompt() -> None:
    bill, rest = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0aaa9;", "You are kind.\nBe brief."
    systems: list[Any] = [f"{bill}\n{rest}", [text(bill), text(rest)], [text(f"{bill}\n"), text(rest)], rest]
    for system in systems:
        assert read_conversation(HI, system) == [{"role": "system", "content": rest}, *HI]
    for system in (bill, [text(bill)], "", []):
        assert read_conversation(HI, system) == HI
    assert read_conversation([{"role": "user", "content": bill}], f"a {bill}") == [
        {"role": "system", "content": f"a {bill}"},
        {"role": "user", "content": bill},
    ]


WHOLE: dict[str, Any] = {
    "max_tokens": 5,
    "system": [text("a")],
    "messages": [
        {"role": "user", "content": [text("x")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "a", "name": "look", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [text("r")], "is_error": True}],
        },
    ],
    "tools": [LOOK],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stop_sequences": ["a"],
    "metadata": {"user_id": "u"},
}
JUNK: list[Any] = [
    None, True, False, 0, -1, 1.5, 10**30, "", "x", [], {}, [[]], [{}], [None],
    {"type": None}, {"type": []}, {"type": {}},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything within ``value``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def test_whatever_stands_anywhere_in_a_body_is_taken_or_refused_with_a_reason() -> None:
    assert parse_message(WHOLE, 256).tools.choice == "required"
    num_taken, reasons = 0, []
    for path in places(WHOLE):
        for junk in JUNK:
            body = copy.deepcopy(WHOLE)
            target: Any = body
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = junk
            try:
                parse_message(body, 256)
                num_taken += 1
            except ClientError as error:
                reasons.append((error.param, error.message))
    assert num_taken > 50
    assert len(reasons) > 200
    assert all(param and message for param, message in reasons)
