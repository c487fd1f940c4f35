"""Request fields: what counts as absent, what is refused by name, and that nothing is ignored by accident."""

from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from aserve.errors import ClientError
from aserve.request import SamplingParams
from aserve.server.prompts import parse_prompts
from aserve.server.responses.schema import parse_create
from aserve.server.schema import (
    ACCEPTED_WITHOUT_EFFECT,
    HARMLESS,
    REFUSED,
    AnswerOptions,
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
)
from aserve.server.structured_request import GRAMMAR_FIELDS

VOCAB = 49152
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> AnswerOptions:
    return parse_chat({"messages": MESSAGES, **fields}, VOCAB)[1]


def complete(**fields: Any) -> AnswerOptions:
    return parse_completion({"prompt": "hi", **fields}, VOCAB)[1]


def create(**fields: Any) -> Any:
    return parse_create({"input": "hi", **fields}, VOCAB)


def refusal(parse: Any, **fields: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        parse(**fields)
    return caught.value


LISTED = ACCEPTED_WITHOUT_EFFECT | HARMLESS.keys() | REFUSED | GRAMMAR_FIELDS


@pytest.mark.parametrize(("official", "body"), [(ChatParams, ChatBody), (CompletionParams, CompletionBody)])
def test_every_field_of_the_official_client_is_in_one_list(official: Any, body: Any) -> None:
    fields = set(official.__annotations__) | {"stream"}
    assert fields - set(body.__struct_fields__) - LISTED == set()


@pytest.mark.parametrize("field", sorted({*ChatBody.__struct_fields__, *LISTED} - {"messages"}))
def test_null_is_absent_in_chat(field: str) -> None:
    assert chat(**{field: None}) == chat()


@pytest.mark.parametrize("field", sorted({*CompletionBody.__struct_fields__, *LISTED} - {"prompt"}))
def test_null_is_absent_in_completions(field: str) -> None:
    assert complete(**{field: None}) == complete()


def test_null_is_absent_in_stream_options() -> None:
    assert not chat(stream_options={"include_usage": None}).include_usage
    assert chat(stream_options={"include_usage": True, "include_obfuscation": False}).include_usage


def test_defaults_are_those_of_the_api() -> None:
    assert chat().params == SamplingParams(max_tokens=None)
    assert complete().params == SamplingParams(max_tokens=16)
    assert (chat().n, chat().is_streamed, chat().include_usage) == (1, False, False)


def test_every_sampling_field_arrives() -> None:
    fields = {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 9, "min_p": 0.125,
        "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2, "seed": -3, "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    expected = SamplingParams(**fields, stop=("a", "b"), stop_token_ids=(5, 6), logit_bias={8: -100}, logprobs=4)
    lists = {"stop": ["a", "b"], "stop_token_ids": [5, 6], "logit_bias": {"8": -100}}
    assert chat(**fields, **lists, logprobs=True, top_logprobs=4).params == expected
    assert complete(**fields, **lists, logprobs=4).params == expected


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).params.max_tokens == 9
    assert chat(max_tokens=5, max_completion_tokens=None).params.max_tokens == 5
    for wrong in (0, 2**31, 2**63):
        assert refusal(chat, max_completion_tokens=wrong).param == "max_completion_tokens"
    assert refusal(chat, max_tokens=0).param == "max_tokens"
    assert complete(max_tokens=0).params.max_tokens == 0


@pytest.mark.parametrize(("stop", "expected"), [("x", ("x",)), (["x", "y"], ("x", "y")), ([], ()), (None, ())])
def test_stop_forms(stop: Any, expected: tuple[str, ...]) -> None:
    assert chat(stop=stop).params.stop == expected


def test_logprobs_without_alternatives() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=False).params.logprobs is None
    assert chat(logprobs=False, top_logprobs=None).params.logprobs is None
    assert refusal(chat, top_logprobs=2).param == "top_logprobs"
    assert complete(logprobs=3, echo=True).params.prompt_logprobs == 3
    assert complete(logprobs=3).params.prompt_logprobs is None


def test_choices_get_seeds_of_their_own() -> None:
    assert [chat(seed=5, n=3).params_of(choice).seed for choice in range(3)] == [5, 6, 7]
    assert chat(seed=2**64 - 1, n=2).params_of(1).seed == 0
    assert chat(n=2).params_of(1).seed is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", True), ("temperature", "1"), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", -1),
        ("max_tokens", 2**31), ("max_tokens", 1e300), ("n", 0), ("n", 129), ("n", 10**6), ("n", True), ("seed", 2**64),
        ("seed", 0.5), ("top_p", 1.0001), ("top_p", -0.1), ("min_p", -1), ("min_p", 1.1), ("top_k", -2), ("top_k", 0.5),
        ("stream", 1), ("stream_options", []), ("stop", 5), ("stop", ["a"] * 17), ("stop", ["a", None]), ("stop", ""),
        ("stop", "x" * 1025), ("stop_token_ids", [49152]), ("stop_token_ids", [-1]), ("stop_token_ids", [True]),
        ("stop_token_ids", [1] * 129), ("logit_bias", {"49152": 5}), ("logit_bias", {"-1": 5}),
        ("logit_bias", {"x": 1}), ("logit_bias", {"1_0": 1}), ("logit_bias", {" 5": 1}), ("logit_bias", {"\u0665": 1}),
        ("logit_bias", {"5" * 5000: 1}), ("seed", float(2**64)), ("max_tokens", 5.5),
        ("logit_bias", {"5": 101}), ("logit_bias", {"5": None}), ("logit_bias", {"5": True}), ("logit_bias", []),
        ("logit_bias", {str(i): 1 for i in range(301)}), ("model", 5), ("priority", 2**31), ("priority", 0.5),
        ("presence_penalty", 2.1), ("repetition_penalty", 0), ("ignore_eos", 0), ("min_tokens", -1),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name_in_both(field: str, value: Any) -> None:
    for parse in (chat, complete):
        error = refusal(parse, **{field: value})
        assert error.status == 400
        assert error.param == field


@pytest.mark.parametrize("value", [21, 10**6, True, -1, 1.5])
def test_wrong_numbers_of_alternatives_are_refused(value: Any) -> None:
    assert refusal(chat, logprobs=True, top_logprobs=value).param == "top_logprobs"
    assert refusal(complete, logprobs=value).param == "logprobs"


@pytest.mark.parametrize("value", [0, -1, 49152, 10**9, 2**63])
def test_any_top_k_is_clamped_to_the_vocabulary(value: int) -> None:
    assert chat(top_k=value).params.top_k == min(value, VOCAB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]), ("function_call", {"name": "f"}), ("modalities", ["text", "audio"]),
        ("audio", {}), ("web_search_options", {}), ("guided_whitespace_pattern", "x"), ("structural_tag", {}),
        ("chat_template", "x"), ("add_generation_prompt", False), ("suffix", "x"), ("use_beam_search", True),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(chat, **{field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "required")],
)
def test_a_completion_has_no_tools(field: str, value: Any) -> None:
    error = refusal(complete, **{field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize("value", ["x", [1], 5, {f"v{n}": 1 for n in range(65)}, {"x": "y" * 70_000}, {"x": [[]]}])
def test_template_variables_are_an_object_of_bounded_size(value: Any) -> None:
    if value == {"x": [[]]}:
        for _ in range(300):
            value = {"x": value}
    assert refusal(chat, chat_template_kwargs=value).param == "chat_template_kwargs"


def test_template_variables_pass_as_they_are() -> None:
    kwargs = {"enable_thinking": False, "thinking_budget": 5, "nested": {"a": [1, None, "b"]}}
    assert parse_chat({"messages": MESSAGES, "chat_template_kwargs": kwargs}, VOCAB)[0].chat_template_kwargs == kwargs
    assert parse_chat({"messages": MESSAGES, "chat_template_kwargs": None}, VOCAB)[0].chat_template_kwargs == {}


def test_harmless_values_of_the_same_fields_pass() -> None:
    fields = {
        "tools": [], "functions": [], "tool_choice": "none", "function_call": "auto", "suffix": "",
        "response_format": {"type": "text"}, "modalities": ["text"], "use_beam_search": False,
    }  # fmt: skip
    assert chat(**fields) == chat()


def test_fields_that_change_nothing_pass() -> None:
    fields = dict.fromkeys(ACCEPTED_WITHOUT_EFFECT, "x")
    assert chat(**fields) == chat()


@pytest.mark.parametrize("parse", [chat, complete, create])
def test_unknown_fields_are_ignored_with_one_line_in_the_log(parse: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aserve.server.schema")
    plain = parse()
    assert not caplog.records
    harmless = {"tools": [], "user": "me", "service_tier": "auto", "tool_choice": "none"}
    assert parse(frobnicate=1, cache_control={}, **{"x\n" * 99: 0}, absent=None) == plain
    assert parse(**harmless) == (parse(tool_choice="none", user="me") if parse is create else plain)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == r"ignoring unknown fields: ['frobnicate', 'cache_control', '" + r"x\n" * 32 + "']"


def test_best_of_must_be_n() -> None:
    assert complete(best_of=2, n=2) == complete(n=2)
    assert refusal(complete, best_of=10**6).param == "best_of"


@pytest.mark.parametrize("messages", [[], ["hi"], "hi", {}, [[]], [{"role": "user", "content": "a"}] * 4097])
def test_messages_must_be_a_bounded_list_of_objects(messages: Any) -> None:
    assert refusal(chat, messages=messages).param == "messages"


def test_missing_required_fields_are_named() -> None:
    with pytest.raises(ClientError) as caught:
        parse_chat({}, VOCAB)
    assert caught.value.param == "messages"
    with pytest.raises(ClientError) as caught:
        parse_completion({"prompt": None}, VOCAB)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]), ([VOCAB - 1], [[VOCAB - 1]]),
    ],
)  # fmt: skip
def test_prompt_forms(prompt: Any, expected: Any) -> None:
    assert parse_prompts(prompt, 1, VOCAB) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        "", [], {}, 5, True, [49152], [-1], [2**63], [1e300], [1.5], [True], [None], [[1, 2], []], ["a", ""], [[]],
        [[1], 2], [1, [2]], ["a", 1], [[[1]]], [{}], ["a"] * 1025, [[1]] * 100_000,
    ],
)  # fmt: skip
def test_wrong_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ClientError) as caught:
        parse_prompts(prompt, 1, VOCAB)
    assert caught.value.param == "prompt"


def test_prompts_times_n_is_bounded() -> None:
    assert len(parse_prompts(["a"] * 8, 128, VOCAB)) == 8
    with pytest.raises(ClientError):
        parse_prompts(["a"] * 9, 128, VOCAB)
