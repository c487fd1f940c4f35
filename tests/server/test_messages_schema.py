"""What the fields of /v1/messages mean to the engine and to the template."""

from typing import Any

import pytest
from doubles_messages import HI

from aserve.errors import ClientError
from aserve.request import GrammarSpec, SamplingParams
from aserve.server.messages_input import read_conversation
from aserve.server.messages_schema import MessagesRequest, parse_count, parse_message
from aserve.server.response_schema import parse_create


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
    assert parse(output_config={"effort": "high"}).params.grammar is None
    assert parse(regex="a+").params.grammar == GrammarSpec("regex", "a+")
    with pytest.raises(ClientError, match="cannot be combined"):
        parse(regex="a+", output_config={"format": given})


@pytest.mark.parametrize(
    ("thinking", "kwargs"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "between_tools"}, {}),
        (None, {}),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking: dict[str, Any] | None, kwargs: dict[str, Any]) -> None:
    assert parse(thinking=thinking).template_kwargs == kwargs
    own = {"enable_thinking": "own", "x": 1}
    assert parse(thinking=thinking, chat_template_kwargs=own).template_kwargs == own


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
