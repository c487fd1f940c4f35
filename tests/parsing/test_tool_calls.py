"""Calls in the formats that model families publish, cut everywhere; what is no call stays text."""

import json
import time
from typing import Any

import pytest
from doubles_parsing import TOOLS, cuts, joined, parse
from hypothesis import given
from hypothesis import strategies as st

from aserve.errors import ConfigError
from aserve.parsing.deltas import ToolCallArguments, ToolCallStart
from aserve.parsing.registry import AnswerFormat, tool_parser

CITY = {"city": 'Prague } "x" \n 😀', "days": 3}
WRITTEN = json.dumps(CITY)
BAR, LOW = "\uff5c", "\u2581"  # DeepSeek's own


def ds(words: str) -> str:
    return f"<{BAR}{words.replace(' ', LOW)}{BAR}>"


TWO = [("get_weather", CITY), ("get_time", {})]
ONE = TWO[:1]
ANSWERS: dict[str, tuple[str, str, str, Any]] = {  # case -> parser, answer, text in it, calls in it
    "hermes": (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WRITTEN}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "Let me see.",
        TWO,
    ),
    "hermes, keys in the other order, and a text behind": (
        "hermes",
        f'<tool_call>{{"arguments": {WRITTEN}, "name": "get_weather"}}</tool_call> Done.',
        " Done.",
        ONE,
    ),
    "hermes, arguments in a string": (
        "qwen",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(WRITTEN)}}}</tool_call>',
        "",
        ONE,
    ),
    "hermes, no arguments": ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', "", TWO[1:]),
    "hermes, the last brace is missing": (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {WRITTEN}</tool_call>',
        "",
        ONE,
    ),
    "hermes, no closing tag": (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {WRITTEN}}}<tool_call>{{"name": "get_time"}}',
        "",
        TWO,
    ),
    "qwen3-coder": (
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n" + CITY["city"] + "\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n"
        "</tool_call>",
        "I look.",
        TWO,
    ),
    "llama3": (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {WRITTEN}}}; {{"name": "get_time", "parameters": {{}}}}',
        "",
        TWO,
    ),
    "llama3 with its tag": (
        "llama3-json",
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {WRITTEN}}}',
        "",
        ONE,
    ),
    "mistral, a list": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WRITTEN}}}, {{"name": "get_time", "arguments": {{}}}}]',
        "",
        TWO,
    ),
    "mistral, from version 11 on": (
        "mistral",
        f"Well.[TOOL_CALLS]get_weather[ARGS]{WRITTEN}[TOOL_CALLS]get_time{{}}",
        "Well.",
        TWO,
    ),
    "pythonic": (
        "pythonic",
        f"[get_weather(city={CITY['city']!r}, days=3), get_time()]",
        "",
        TWO,
    ),
    "llama4": ("pythonic", f"<|python_start|>[get_weather(city={CITY['city']!r}, days=3)]<|python_end|>", "", ONE),
    "deepseek v3": (
        "deepseek",
        f"Ok.{ds('tool calls begin')}{ds('tool call begin')}function{ds('tool sep')}get_weather\n```json\n{WRITTEN}"
        f"\n```{ds('tool call end')}\n{ds('tool call begin')}function{ds('tool sep')}get_time\n```json\n{{}}\n```"
        f"{ds('tool call end')}{ds('tool calls end')}",
        "Ok.",
        TWO,
    ),
    "deepseek v3.1": (
        "deepseek_v31",
        f"{ds('tool calls begin')}{ds('tool call begin')}get_weather{ds('tool sep')}{WRITTEN}{ds('tool call end')}"
        f"{ds('tool call begin')}get_time{ds('tool sep')}{{}}{ds('tool call end')}{ds('tool calls end')}",
        "",
        TWO,
    ),
    "harmony": (
        "gpt-oss",
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{WRITTEN}<|call|><|start|>assistant"
        "<|channel|>commentary to=functions.get_time<|message|><|call|>",
        "Let me see.",
        TWO,
    ),
    "harmony, a preamble and an answer": (
        "harmony",
        "<|channel|>commentary<|message|>I see.<|end|><|start|>assistant<|channel|>final<|message|>Rain.<|return|>",
        "I see.\n\nRain.",
        [],
    ),
    "harmony, the recipient in the role": (
        "harmony",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{WRITTEN}",
        "",
        ONE,
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_calls_are_found_however_the_answer_is_cut(case: str) -> None:
    name, answer, text, calls = ANSWERS[case]
    for pieces in cuts(answer):
        found = parse(tool_parser(name, TOOLS), pieces)
        assert (found[0], found[1]) == (text, ""), pieces
        assert [(function, json.loads(arguments)) for function, arguments in found[2]] == calls, pieces
    whole = parse(tool_parser(name, TOOLS), [answer])
    assert all(parse(tool_parser(name, TOOLS), pieces) == whole for pieces in cuts(answer))


@pytest.mark.parametrize("case", ANSWERS)
def test_a_cut_answer_never_has_a_call_too_many_nor_loses_its_text(case: str) -> None:
    name, answer, _, calls = ANSWERS[case]
    for end in range(len(answer)):
        found = parse(tool_parser(name, TOOLS), list(answer[:end]))
        assert found == parse(tool_parser(name, TOOLS), [answer[:end]])
        assert [function for function, _ in found[2]] == [function for function, _ in calls][: len(found[2])]
        if not found[2] and name not in ("gpt-oss", "harmony", "deepseek", "deepseek_v31"):
            assert found[0] == answer[:end], "what is no call yet is text"
        for function, arguments in found[2][:-1]:
            assert json.loads(arguments) == dict(calls)[function]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", "Plain words; and <tool_call is no tag. "),
        ("hermes", "<tool_call>not JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call> and more'),
        ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f" "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "f", "argu'),
        ("hermes", "  <tool_call> <tool_call>"),
        ("qwen3_coder", "<tool_call>\n<parameter=x>1</parameter></tool_call>" + "x" * 600),
        ("qwen3_coder", "<tool_call>\n<function=get_weather"),
        ("llama3_json", '{"title": "an answer in JSON", "name": "get_weather"}'),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", 'I would say {"name": "get_weather", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] [5]"),
        ("mistral", "[TOOL_CALLS]" + "x" * 600),
        ("pythonic", "[a link](https://example.org) and more"),
        ("pythonic", "[get_weather(city=open('x'))]"),
        ("pythonic", "[get_weather('Prague')]"),
        ("pythonic", "[get_weather(city='Prague'), 5]"),
        ("pythonic", "[get_weather(city=) ]"),
        ("pythonic", "[]"),
        ("pythonic", "[get_weather(city=" + "(" * 2000 + ")" * 2000 + ")]"),
        ("pythonic", "[get_weather(city='" + "x" * 70000),
        ("harmony", "No channels at all."),
    ],
)
def test_what_is_no_call_is_text(name: str, answer: str) -> None:
    step = max(1, len(answer) // 500)
    for pieces in ([answer], [answer[start : start + step] for start in range(0, len(answer), step)]):
        assert parse(tool_parser(name, TOOLS), pieces) == (answer, "", [])


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = tool_parser("hermes", TOOLS)
    assert parser.push('<tool_call>{"name": "get_weather", "arguments": ') == []
    start, first = parser.push('{"city": "Pra')
    assert isinstance(start, ToolCallStart)
    assert (start.index, start.name) == (0, "get_weather")
    assert start.id.startswith("call_")
    assert first == ToolCallArguments(0, '{"city": "Pra')
    assert parser.push('gue"}') == [ToolCallArguments(0, 'gue"}')]
    assert parser.push("}</tool_call>") == []


STRINGS = [
    "", "a", "\n", "\n\n", " a ", "\nx\n", '"quoted" \\ \\n \t\x00\x1f', "é😀\u2028",
    "a < b </par> </parameter", "<" * 9, "\n</parameter", "</\n</p\n", "<parameter=city>\nx",
    "</function>\n</tool_call>", "def f():\n    return '<a>'\n",
]  # fmt: skip


def coder_call(city: str) -> str:
    return (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        f"<parameter=note>\n[1]\n</parameter>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize("city", STRINGS)
def test_pieces_of_a_tagged_string_join_to_its_json_however_it_is_cut(city: str) -> None:
    for pieces in cuts(coder_call(city)):
        text, _, ((name, arguments),) = parse(tool_parser("qwen3_coder", TOOLS), pieces)
        assert (text, name, json.loads(arguments)) == ("", "get_weather", {"city": city, "days": 3, "note": [1]})


@given(
    st.lists(st.sampled_from(["\n", "<", "</parameter", "</", "parameter>", '"', "\\", "é", "a"]) | st.text()).map(
        "".join
    )
)
def test_any_tagged_string_survives(city: str) -> None:
    if "</parameter>" not in city:
        _, _, ((_, arguments),) = parse(tool_parser("qwen3_coder", TOOLS), list(coder_call(city)))
        assert json.loads(arguments) == {"city": city, "days": 3, "note": [1]}


@pytest.mark.parametrize("city", STRINGS)
def test_a_tagged_string_is_passed_on_while_it_is_written(city: str) -> None:
    parser = tool_parser("qwen3_coder", TOOLS)
    seen = "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    opening, brace, key = parser.push(seen)
    assert isinstance(opening, ToolCallStart)
    assert (brace, key) == (ToolCallArguments(0, "{"), ToolCallArguments(0, '"city": "'))
    sent = '{"city": "'
    for place, letter in enumerate(city, start=1):
        sent += "".join(delta.text for delta in parser.push(letter) if isinstance(delta, ToolCallArguments))
        behind = city[:place].removeprefix(json.loads(sent + '"}')["city"])
        assert len(behind) < len("\n</parameter>")
        assert "\n</parameter>".startswith(behind) or "</parameter>".startswith(behind)


def test_text_waits_only_for_what_may_become_a_marker() -> None:
    parser = tool_parser("hermes", TOOLS)
    assert joined(parser.push("a <")) == ("a", "", [])
    assert joined(parser.push("b")) == (" <b", "", [])
    assert joined(parser.push("<tool_cal")) == ("", "", [])
    assert joined(parser.push("m")) == ("<tool_calm", "", [])


def test_mistral_gets_ids_that_its_templates_take_back() -> None:
    for delta in tool_parser("mistral", TOOLS).push("[TOOL_CALLS]get_time{}"):
        if isinstance(delta, ToolCallStart):
            assert len(delta.id) == 9
            assert delta.id.isalnum()


def test_calls_beyond_the_first_are_dropped_on_demand() -> None:
    answer = (
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {WRITTEN}}}, {{"name": "get_time", "arguments": {{}}}}]'
    )
    parser = AnswerFormat("mistral").parser(TOOLS, max_calls=1)
    assert parser is not None
    assert parse(parser, list(answer)) == ("", "", [("get_weather", WRITTEN)])


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown tool parser 'x'; known: auto, none, hermes, .*qwen"):
        tool_parser("x", TOOLS)


MARKERS = ["<tool_call>", "</tool_call>", "<function=", "[TOOL_CALLS]", "[", "{", '{"name": "get_time"', '"arguments"',
           "<|python_tag|>", "[ARGS]", "get_time(", ")]", ds("tool call begin"), ds("tool sep"), "<|channel|>",
           "<|end|>", "<|message|>", "to=functions.f", "<|call|>", "}", ":", ",", '"', "\\", ";", " ", "\n",
           "x"]  # fmt: skip
NAMES = ["hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic", "deepseek", "harmony"]


@given(st.sampled_from(NAMES), st.lists(st.lists(st.sampled_from(MARKERS), max_size=6).map("".join), max_size=8))
def test_any_cut_of_any_text_says_the_same(name: str, pieces: list[str]) -> None:
    whole = parse(tool_parser(name, TOOLS), ["".join(pieces)])
    assert parse(tool_parser(name, TOOLS), pieces) == whole
    assert parse(tool_parser(name, TOOLS), list("".join(pieces))) == whole


@given(st.dictionaries(st.text(), st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5)))
def test_any_arguments_survive(arguments: dict[str, Any]) -> None:
    for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=1)):
        answer = f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>'
        assert parse(tool_parser("hermes", TOOLS), list(answer)) == ("", "", [("f", text)])


@pytest.mark.parametrize("name", ["city", "note"])
def test_a_long_value_takes_time_in_proportion(name: str) -> None:
    def seconds(num_pieces: int) -> float:
        parser = tool_parser("qwen3_coder", TOOLS)
        text = f"<tool_call><function=get_weather><parameter={name}>", "</par x", "</parameter></function></tool_call>"
        started = time.process_time()
        found = parse(parser, [text[0], *[text[1] * 4] * num_pieces, *text[2]])
        assert found == ("", "", [("get_weather", json.dumps({name: text[1] * 4 * num_pieces}))])
        return time.process_time() - started

    assert min(seconds(20_000) for _ in range(3)) < 10 * min(seconds(5_000) for _ in range(3))  # 16 if quadratic
