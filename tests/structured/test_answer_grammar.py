"""What grammars of whole answers allow is what the parsers read as the same calls, and nothing else."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from doubles_http import demo_tokenizer
from doubles_parsing import TOOLS, WEATHER, parse
from doubles_structured import EOS, allowed, demo_compiler

from aserve.errors import ClientError
from aserve.parsing.registry import tool_parser
from aserve.request import GrammarSpec
from aserve.structured.answer_rules import AnswerRules, ReasoningMarkers
from aserve.structured.call_syntax import CALL_SYNTAXES

BAR, LOW = "\uff5c", "\u2581"
CITY = json.dumps({"city": 'Prague } "x" 😀', "days": 3}, ensure_ascii=False)


def ds(words: str) -> str:
    return f"<{BAR}{words.replace(' ', LOW)}{BAR}>"


CALLS = {  # syntax -> parser, two calls as the model family's own templates write them
    "hermes": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nPrague } "x" 😀\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    ),
    "llama3_json": (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "get_time", "parameters": {{}}}}',
    ),
    "mistral": (
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "get_time", "arguments": {{}}}}]',
    ),
    "mistral_args": ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]get_time[ARGS]{{}}"),
    "pythonic": ("pythonic", '[get_weather(city="Prague } \\"x\\" 😀", days=3), get_time()]'),
    "deepseek": (
        "deepseek",
        f"{ds('tool calls begin')}{ds('tool call begin')}get_weather{ds('tool sep')}{CITY}{ds('tool call end')}"
        f"{ds('tool call begin')}get_time{ds('tool sep')}{{}}{ds('tool call end')}{ds('tool calls end')}",
    ),
    "deepseek_fenced": (
        "deepseek",
        f"{ds('tool calls begin')}{ds('tool call begin')}function{ds('tool sep')}get_weather\n```json\n{CITY}\n```"
        f"{ds('tool call end')}\n{ds('tool call begin')}function{ds('tool sep')}get_time\n```json\n{{}}\n```"
        f"{ds('tool call end')}{ds('tool calls end')}",
    ),
    "harmony": ("harmony", f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}"),
}
FUNCTIONS = tuple(TOOLS.items())
ANSWER = ("json_schema", '{"type":"object","properties":{"name":{"type":"integer"}},"required":["name"]}')


def rules(syntax: str, **fields: Any) -> AnswerRules:
    defaults = {"functions": FUNCTIONS, "must_call": True, "is_harmony": syntax == "harmony"}
    return AnswerRules(syntax=syntax, **(defaults | fields))


def allows(answer_rules: AnswerRules, text: str) -> bool:
    """Whether ``text`` is a whole answer by the rules."""
    matcher = demo_compiler().compile(answer_rules.spec()).start()
    ids = demo_tokenizer().encode(text)
    if matcher.validate_tokens(ids) < len(ids):
        return False
    matcher.consume_tokens(ids)
    return bool(matcher.is_accepting())


def test_each_syntax_is_tested() -> None:
    assert CALLS.keys() == CALL_SYNTAXES.keys()


@pytest.mark.parametrize("syntax", CALLS)
def test_calls_that_are_allowed_are_those_that_are_read(syntax: str) -> None:
    parser, text = CALLS[syntax]
    calls = [(name, json.loads(arguments)) for name, arguments in parse(tool_parser(parser, TOOLS), list(text))[2]]
    assert calls == [("get_weather", json.loads(CITY)), ("get_time", {})][: len(calls)]
    assert len(calls) == 1 + (syntax != "harmony")
    assert allows(rules(syntax), text)
    for wrong in ("", "Hello", text.replace("get_weather", "get_wealth"), text.replace("city", "town"), text + "x"):
        assert not allows(rules(syntax), wrong), wrong
    assert allows(rules(syntax, is_single=True), text) is (len(calls) == 1)
    only_time = rules(syntax, functions=(("get_time", None),))
    assert not allows(only_time, text)


@pytest.mark.parametrize("syntax", CALLS)
def test_text_may_stand_around_calls_but_a_call_that_has_begun_is_held_to_its_schema(syntax: str) -> None:
    _, text = CALLS[syntax]
    free = rules(syntax, must_call=False)
    said = "<|channel|>final<|message|>Hello <you>" if syntax == "harmony" else "Hello <you>"
    assert allows(free, text)
    assert allows(free, said)
    assert not allows(free, text.replace("city", "town"))
    if syntax not in ("harmony", "llama3_json", "pythonic"):
        assert allows(free, f"Let me see.\n{text}")
        assert not allows(free, f"Let me see.\n{text.replace('get_weather', 'get_wealth')}")
    else:
        assert not allows(free, f" {text.replace('city', 'town')}"), "parsers look past spaces"
    loose = rules(syntax, must_call=False, functions=(("get_weather", None), ("get_time", None)))
    assert allows(loose, text.replace("city", "town"))


@pytest.mark.parametrize("syntax", CALLS)
def test_an_answer_in_a_form_of_its_own_may_come_in_place_of_calls(syntax: str) -> None:
    _, text = CALLS[syntax]
    either = rules(syntax, must_call=False, answer=ANSWER)
    final = "<|channel|>final<|message|>" if syntax == "harmony" else ""
    assert allows(either, text)
    assert allows(either, final + '{"name": 3}')
    assert not allows(either, final + '{"name": "x"}')
    assert not allows(either, final + "Hello")


@pytest.mark.parametrize("answer", [ANSWER, ("regex", r'\{"name": 3\}'), ("choice", '["{\\"name\\": 3}"]')])
def test_reasoning_comes_first_and_is_free(answer: Any) -> None:
    thinking = ReasoningMarkers("<think>", "</think>")
    maybe = AnswerRules(answer=answer, reasoning=thinking)
    assert allows(maybe, '{"name": 3}')
    assert allows(maybe, '<think>\nHm, {"name": "x"}?\n</think>\n\n{"name": 3}')
    assert not allows(maybe, "<think>Hm.")
    assert not allows(maybe, '<think>Hm.</think>{"name": "x"}')
    opened = AnswerRules(answer=answer, reasoning=ReasoningMarkers("<think>", "</think>", True))
    assert allows(opened, 'Hm.\n</think>\n\n{"name": 3}')
    assert not allows(opened, '{"name": 3}')
    harmony = AnswerRules(answer=answer, is_harmony=True)
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert allows(harmony, f'{analysis}<|channel|>final<|message|>{{"name": 3}}')


def test_markers_that_are_control_tokens_are_allowed_as_such_only() -> None:
    marked = rules("mistral", token_ids={"[TOOL_CALLS]": 17})
    _, text = CALLS["mistral"]
    matcher = demo_compiler().compile(marked.spec()).start()
    ids = demo_tokenizer().encode(text.removeprefix("[TOOL_CALLS]"))
    assert matcher.validate_tokens([17, *ids]) == len(ids) + 1
    assert matcher.validate_tokens(demo_tokenizer().encode(text)) == 0
    free = demo_compiler().compile(rules("mistral", must_call=False, token_ids={"[TOOL_CALLS]": 17}).spec()).start()
    hello = demo_tokenizer().encode("Hello")
    assert free.validate_tokens([*hello, 17, *ids]) == len(hello) + 1 + len(ids)


@pytest.mark.parametrize("present", [(), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")])
@pytest.mark.parametrize("required", [(), ("a",), ("b",), ("c",), ("a", "c")])
def test_optional_parameters_may_be_left_out(present: tuple[str, ...], required: tuple[str, ...]) -> None:
    schema = {"properties": {"a": True, "b": {"type": "integer"}, "c": {"enum": [1, "x"]}}, "required": [*required]}
    is_right = set(required) <= set(present)
    pythonic = rules("pythonic", functions=(("f", schema),))
    assert allows(pythonic, f"[f({', '.join(f'{name}=1' for name in present)})]") is is_right
    tagged = rules("qwen3_coder", functions=(("f", schema),))
    tags = "".join(f"<parameter={name}>\n1\n</parameter>\n" for name in present)
    assert allows(tagged, f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>") is is_right


@pytest.mark.parametrize("syntax", ["llama3_json", "pythonic", "qwen3_coder"])
def test_definitions_go_with_the_parts_of_a_schema(syntax: str) -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "$defs": {"n": {"type": "integer"}}}
    texts = {
        "llama3_json": '{"name": "f", "parameters": {"a": 1}}',
        "pythonic": "[f(a=1)]",
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    }
    named = rules(syntax, functions=(("f", {"type": "object", **schema}),))
    assert allows(named, texts[syntax])
    assert not allows(named, texts[syntax].replace("1", "true"))


@pytest.mark.parametrize(
    ("syntax", "name", "schema", "message"),
    [
        ("hermes", "f", {"type": "frob"}, "frob"),
        ("hermes", "f", {"minProperties": 5}, "function f: minProperties"),
        ("pythonic", "get-weather", None, "function get-weather: its name"),
        ("pythonic", "f", {"properties": {"a-b": {}}}, "no name in Python"),
        ("pythonic", "f", {"properties": [1]}, "properties must be an object"),
        ("qwen3_coder", "f", {"properties": {"a>": {}}}, "cannot stand in a tag"),
        ("qwen3_coder", "f", {"properties": {"a": 5}}, "must be an object"),
        ("qwen3_coder", "f", {"properties": {}, "required": ["b"]}, "which is no property"),
        ("pythonic", "f", {"properties": {}, "required": [["b"]]}, "which is no property"),
        ("llama3_json", "f", {"properties": {"a": {"$ref": "#"}}}, r"\$ref to '#' is not supported"),
        ("latin", "f", None, "in the syntax 'latin'"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(syntax: str, name: str, schema: Any, message: str) -> None:
    with pytest.raises(ClientError, match=message):
        demo_compiler().compile(rules(syntax, functions=((name, schema),)).spec())


def test_rules_survive_the_way_to_the_compiler() -> None:
    full = rules("hermes", functions=(("f", WEATHER),), is_single=True, answer=ANSWER, token_ids={"<x>": 3})
    assert AnswerRules.of(full.spec()) == full
    with pytest.raises(ClientError, match="cannot be read"):
        AnswerRules.of(GrammarSpec("answer", '{"functions": 5}'))


WALKED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": -5, "maximum": 500},
        "e": {"type": "string", "enum": ["a b", 'c"d', "}"]},
        "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "x": {"type": ["integer", "null"]},
    },
    "required": ["n", "e"],
    "additionalProperties": False,
}


def walk(answer_rules: AnswerRules, rng: random.Random) -> str:
    """Return an answer of tokens that are drawn from those that the grammar allows."""
    matcher, ids = demo_compiler().compile(answer_rules.spec()).start(), []
    while not matcher.is_stopped():
        mask = allowed(np.frombuffer(matcher.compute_bitmask(), np.int32))
        if EOS in mask and (len(mask) == 1 or rng.random() < 0.6):
            break
        ids.append(rng.choice(sorted(mask - {EOS})))
        matcher.consume_token(ids[-1])
    assert matcher.is_accepting()
    return b"".join(map(demo_tokenizer().token_bytes, ids)).decode()


@pytest.mark.parametrize("syntax", CALLS)
def test_whatever_a_grammar_allows_is_read_as_calls_that_keep_to_their_schemas(syntax: str) -> None:
    named = {key: value for key, value in WALKED["properties"].items() if (key, syntax) != ("s", "qwen3_coder")}
    tools = {"f": {**WALKED, "properties": named}, "g": {**WALKED, "properties": {}, "required": []}}
    for seed in range(6):  # a plain string has no bounds where it stands without quotes
        is_single = seed % 2 == 0
        calling = rules(syntax, functions=tuple(tools.items()), is_single=is_single, is_harmony=False)  # no reasoning
        text = walk(calling, random.Random(seed))
        content, reasoning, calls = parse(tool_parser(CALLS[syntax][0], tools), list(text))
        assert (content, reasoning) == ("", ""), text
        assert calls
        assert len(calls) == 1 or not is_single
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), tools[name])
