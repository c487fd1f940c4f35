"""Reasoning told from the answer, in front of calls, too; and the parsers that go with published chat templates."""

import time

import pytest
from doubles_parsing import TOOLS, cuts, parse
from hypothesis import given
from hypothesis import strategies as st

from aserve.errors import ConfigError
from aserve.parsing.deltas import ReasoningDelta
from aserve.parsing.registry import AnswerFormat, choose_format, reasoning_parser, tool_parser

CASES = {
    "opened by the model": (False, "<think>\nHm, < 5.\n\nYes.\n</think>\n\nIt is 5.", "It is 5.", "Hm, < 5.\n\nYes."),
    "opened by the template": (True, "\nHm.\n</think>\n\nIt is 5. ", "It is 5. ", "Hm."),
    "no reasoning": (False, " It is <think> of it.", " It is <think> of it.", ""),
    "never closed": (True, "Hm, and </thin", "", "Hm, and </thin"),
    "nothing behind": (False, "<think>Hm.</think>\n", "", "Hm."),
    "empty": (False, "<think>\n\n</think>\n\nYes", "Yes", ""),
    "a second opening is text": (True, "a</think>b<think>c</think>", "b<think>c</think>", "a"),
}


@pytest.mark.parametrize("case", CASES)
def test_reasoning_is_told_from_text_however_it_is_cut(case: str) -> None:
    is_open, answer, text, reasoning = CASES[case]
    for pieces in cuts(answer):
        assert parse(reasoning_parser("deepseek-r1", is_open=is_open), pieces) == (text, reasoning, []), pieces


def test_channels() -> None:
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    for pieces in cuts(answer):
        assert parse(reasoning_parser("gpt_oss"), pieces) == ("Yes.", "Hm.", [])
    parser = reasoning_parser("harmony")
    assert parser.push("<|channel|>analysis<|message|>") == []
    assert parser.push("Hm") == [ReasoningDelta("Hm")]


def test_calls_to_functions_that_were_not_offered_are_text() -> None:
    answer = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    parser = AnswerFormat("harmony", "harmony").parser(None)
    assert parser is not None
    assert parse(parser, list(answer)) == ("{}", "", [])


def test_a_call_behind_reasoning_is_found_and_one_within_it_is_not() -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    answer = f"<think>\nShall I write {call}?\n</think>\n\nYes.\n{call}"
    for pieces in cuts(answer):
        parser = AnswerFormat("hermes", "think").parser(TOOLS)
        assert parser is not None
        assert parse(parser, pieces) == ("Yes.", f"Shall I write {call}?", [("get_time", "{}")])


@given(st.booleans(), st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "/", " ", "\n", "x"])))
def test_any_cut_of_any_text_says_the_same(is_open: bool, pieces: list[str]) -> None:
    whole = parse(reasoning_parser("think", is_open=is_open), ["".join(pieces)])
    assert parse(reasoning_parser("think", is_open=is_open), pieces) == whole
    assert parse(reasoning_parser("think", is_open=is_open), list("".join(pieces))) == whole


@pytest.mark.parametrize("num_spaces", [64, 65])
def test_reasoning_stands_at_the_beginning(num_spaces: int) -> None:
    answer = "\n" * num_spaces + "<think>Hm.</think>Yes."
    expected = ("Yes.", "Hm.", []) if num_spaces == 64 else (answer, "", [])
    for pieces in cuts(answer):
        assert parse(reasoning_parser("think"), pieces) == expected


def test_an_answer_of_nothing_but_space_takes_time_in_proportion() -> None:
    def seconds(num_chars: int) -> float:
        parser = AnswerFormat("hermes", "think").parser(TOOLS)
        assert parser is not None
        started = time.process_time()
        found = parse(parser, [" "] * num_chars)
        assert found == (" " * num_chars, "", [])
        return time.process_time() - started

    assert min(seconds(20_000) for _ in range(3)) < 10 * min(seconds(5_000) for _ in range(3))  # 16 if quadratic


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        ("{{ message.content }}", "hermes", None),
        ("within <tool_call></tool_call> XML tags ... {%- if '</think>' in content %}", "hermes", "think"),
        ("<tool_call>\n<function=example_function_name>", "qwen3_coder", None),
        ("{{- '<|start_header_id|>' }}{{- '<|python_tag|>' }}", "llama3_json", None),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|python_start|>[func_name1(x=1)]", "pythonic", None),
        ("<\uff5ctool\u2581call\u2581begin\uff5c> </think>", "deepseek", "think"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
    ],
)
def test_a_template_tells_which_parsers_go_with_it(template: str, tool: str, reasoning: str | None) -> None:
    assert choose_format(template) == AnswerFormat(tool, reasoning)
    assert choose_format(template, "none", "none") == AnswerFormat()
    assert choose_format(template, "llama3", "deepseek_r1") == AnswerFormat("llama3_json", "think")


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown reasoning parser 'hermes'"):
        choose_format("", reasoning="hermes")
    with pytest.raises(ConfigError, match="unknown tool parser"):
        choose_format("", tool="think")


def test_a_prompt_tells_whether_it_opens_the_reasoning() -> None:
    thinking = AnswerFormat(reasoning="think")
    assert thinking.is_opened_by("<|im_start|>assistant\n<think>\n")
    assert not thinking.is_opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not thinking.is_opened_by("what is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert not AnswerFormat().is_opened_by("<think>")
    assert thinking.is_left_open_by("<think>Hm, I")
    assert not thinking.is_left_open_by("<think>Hm.</think>Yes, I")


def test_the_markers_are_all_that_the_parsers_look_for() -> None:
    assert AnswerFormat().markers == ()
    assert AnswerFormat("hermes", "think").markers == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert "<|message|>" in AnswerFormat("harmony", "harmony").markers
    for name in ("mistral", "deepseek", "llama3_json", "pythonic"):
        assert AnswerFormat(name).markers


def test_a_parser_is_made_only_where_there_is_something_to_find() -> None:
    assert AnswerFormat("hermes").parser() is None
    assert AnswerFormat().parser(TOOLS) is None
    assert AnswerFormat("hermes").parser(TOOLS) is not None
    assert parse(tool_parser("harmony", TOOLS), ["<|channel|>commentary to=functions.f<|message|>"])[2] == [("f", "")]
