"""Tools as clients describe them, and what they make of the grammar and the reader of an answer."""

from typing import Any

import pytest
from doubles_http import demo_tokenizer
from doubles_parsing import WEATHER
from doubles_structured import demo_compiler

from aserve.config import Config, EngineConfig, ServerConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.errors import ClientError, ConfigError
from aserve.request import GrammarSpec, SamplingParams
from aserve.server.answer_style import AnswerPlan, AnswerStyle
from aserve.server.state import ServerState
from aserve.server.tools import FunctionTool, ToolOptions, check_function, check_tools
from aserve.structured.answer_rules import AnswerRules

PROMPT = tuple(demo_tokenizer().encode_chat([{"role": "user", "content": "hi"}]))
WEATHER_TOOL = check_function("tools[0]", name="get_weather", description="Weather.", parameters=WEATHER)
TIME_TOOL = check_function("tools[1]", name="get_time")
STRICT = check_function("tools[0]", name="get_weather", parameters=WEATHER, strict=True)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Prague"}}\n</tool_call>'


def options(**fields: Any) -> ToolOptions:
    return ToolOptions(**({"tools": (WEATHER_TOOL, TIME_TOOL)} | fields))


def plan(tools: ToolOptions, grammar: GrammarSpec | None = None, **settings: Any) -> AnswerPlan:
    style = AnswerStyle(demo_tokenizer(), ServerConfig(**settings))
    return style.plan(tools, SamplingParams(grammar=grammar), PROMPT)


def test_only_what_thinks_has_a_budget_for_it() -> None:
    style = AnswerStyle(demo_tokenizer(), ServerConfig(reasoning_parser="think"))

    def budget(answer: AnswerPlan) -> int | None:
        grammar = answer.params.grammar
        return None if grammar is None else AnswerRules.of(grammar).max_reasoning_tokens

    params = SamplingParams()
    assert budget(style.plan(options(), params, PROMPT, max_reasoning_tokens=5)) == 5
    assert budget(style.plan(ToolOptions(), params, PROMPT, max_reasoning_tokens=5, continued="<think>Hm")) == 5
    assert budget(style.plan(options(choice="required"), params, PROMPT, max_reasoning_tokens=5)) == 5
    assert style.plan(ToolOptions(), params, PROMPT, max_reasoning_tokens=5, continued="Yes").params.grammar is None
    assert style.plan(options(), params, PROMPT).params.grammar is None
    silent = AnswerStyle(demo_tokenizer(), ServerConfig(reasoning_parser="none"))
    assert silent.plan(options(), params, PROMPT, max_reasoning_tokens=5).params.grammar is None


def allows(answer: AnswerPlan, text: str) -> bool:
    if answer.params.grammar is None:
        return True
    matcher = demo_compiler().compile(answer.params.grammar).start()
    ids = demo_tokenizer().encode(text)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def test_a_function_becomes_what_templates_know() -> None:
    assert WEATHER_TOOL.template_form() == {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER},
    }
    assert FunctionTool("get_time", None, {"type": "object", "properties": {}}, False) == TIME_TOOL
    assert "description" not in TIME_TOOL.template_form()["function"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": None}, "tools[3].name"),
        ({"name": ""}, "tools[3].name"),
        ({"name": "get weather"}, "tools[3].name"),
        ({"name": "žluť"}, "tools[3].name"),
        ({"name": "x" * 129}, "tools[3].name"),
        ({"name": 'f"'}, "tools[3].name"),
        ({"name": "f\n"}, "tools[3].name"),
        ({"name": "f", "description": 5}, "tools[3].description"),
        ({"name": "f", "parameters": []}, "tools[3].parameters"),
        ({"name": "f", "parameters": "x"}, "tools[3].parameters"),
        ({"name": "f", "strict": "yes"}, "tools[3].strict"),
        ({"name": "f", "description": "\ud800"}, "tools[3]"),
    ],
)
def test_a_wrong_function_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ClientError) as caught:
        check_function("tools[3]", **fields)
    assert caught.value.param == param


def test_too_many_tools_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(ClientError, match="two functions named get_time"):
        check_tools([TIME_TOOL, WEATHER_TOOL, TIME_TOOL])
    with pytest.raises(ClientError, match="more than 512"):
        check_tools(check_function("tools", name=f"f{number}") for number in range(513))
    assert check_tools([TIME_TOOL, WEATHER_TOOL]) == (TIME_TOOL, WEATHER_TOOL)


def test_a_choice_decides_what_may_be_called_and_what_the_model_is_told() -> None:
    def names(tools: ToolOptions) -> tuple[list[str], list[str]]:
        told = [tool["function"]["name"] for tool in tools.for_template() or ()]
        return [tool.name for tool in tools.callable], told

    both = ["get_weather", "get_time"]
    assert names(ToolOptions()) == ([], [])
    assert names(options()) == (both, both)
    assert names(options(choice="none")) == ([], [])
    assert names(options(choice="required")) == (both, both)
    assert names(options(choice="required", allowed={"get_time"})) == (["get_time"], both)
    assert names(options(allowed={"get_time"})) == (["get_time"], ["get_time"])
    for wrong in ({"allowed": {"f"}}, {"choice": "required", "tools": ()}, {"choice": "required", "allowed": ()}):
        with pytest.raises(ClientError) as caught:
            options(**wrong)
        assert caught.value.param == "tool_choice"


def test_only_what_must_be_held_gets_a_grammar() -> None:
    answer = GrammarSpec("regex", "[0-9]+")
    assert plan(options()).params.grammar is None
    assert plan(options(choice="none")).params.grammar is None
    assert plan(ToolOptions(), answer).params.grammar is answer
    assert plan(options(choice="none"), answer).params.grammar is answer
    assert plan(options(), answer, tool_call_parser="none").params.grammar is answer


def test_a_required_call_is_the_whole_answer() -> None:
    required = plan(options(choice="required"), GrammarSpec("regex", "[0-9]+"))
    assert allows(required, CALL)
    assert allows(required, f"{CALL}\n{CALL}")
    for wrong in ("", "12", f"Hello {CALL}", CALL.replace("city", "town"), CALL.replace('"Prague"', "5")):
        assert not allows(required, wrong), wrong
    single = plan(options(choice="required", is_parallel=False))
    assert allows(single, CALL)
    assert not allows(single, f"{CALL}\n{CALL}")
    assert not allows(plan(options(choice="required", allowed={"get_time"})), CALL)
    with pytest.raises(ClientError) as caught:
        plan(options(choice="required"), tool_call_parser="none")
    assert caught.value.param == "tool_choice"


def test_arguments_that_a_schema_does_not_name_are_written_only_where_it_asks_for_them() -> None:
    asked = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    referring = {"type": "object", "properties": {}, "$defs": {"a": WEATHER}, "allOf": [{"$ref": "#/$defs/a"}]}
    for schema, is_open in ((WEATHER, False), (asked, True), (referring, True), ({"type": "object"}, True)):
        tool = check_function("tools[0]", name="get_weather", parameters=schema)
        required = plan(options(tools=(tool,), choice="required"))
        assert allows(required, CALL)
        assert allows(required, CALL.replace('"Prague"', '"Prague", "x": 5')) is is_open
        assert tool.template_form()["function"]["parameters"] == schema


def test_arguments_are_an_object_though_the_schema_does_not_say_so() -> None:
    for schema in ({}, {"properties": {"city": {}}}, {"description": "any"}):
        tool = check_function("tools[0]", name="get_weather", parameters=schema)
        required = plan(options(tools=(tool,), choice="required"))
        assert allows(required, CALL)
        assert not allows(required, CALL.replace('{"city": "Prague"}', "5"))


def test_what_is_too_long_to_be_enforced_is_refused_by_name() -> None:
    tool = check_function("tools[0]", name="f", parameters={"type": "object", "description": "x" * 140_000})
    assert plan(options(tools=(tool,))).params.grammar is None
    with pytest.raises(ClientError, match="the tools cannot be enforced") as caught:
        plan(options(tools=(tool,), choice="required"))
    assert caught.value.param == "tools"


def test_a_strict_function_is_held_to_its_schema_and_others_are_not() -> None:
    strict = plan(options(tools=(STRICT, TIME_TOOL)))
    for right in ("Hello", CALL, f"I look.\n{CALL}", CALL.replace("get_weather", "get_time")):
        assert allows(strict, right), right
    assert not allows(strict, CALL.replace("city", "town"))


def test_an_answer_in_a_format_leaves_room_for_calls() -> None:
    either = plan(options(), GrammarSpec("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}'))
    assert allows(either, CALL)
    assert allows(either, '{"a": 3}')
    assert not allows(either, "Hello")
    assert not allows(either, '{"a": "x"}')


def test_another_parser_brings_its_syntax() -> None:
    required = plan(options(choice="required"), tool_call_parser="llama3_json")
    assert allows(required, '{"name": "get_weather", "parameters": {"city": "Prague"}}')
    assert not allows(required, CALL)


def test_reasoning_comes_before_an_answer_in_a_format() -> None:
    thinking = plan(ToolOptions(), GrammarSpec("regex", "[0-9]+"), reasoning_parser="think")
    assert allows(thinking, "<think>Hm.</think>\n\n12")
    assert allows(thinking, "12")
    assert not allows(thinking, "<think>Hm.</think>Hello")


def test_a_reader_is_made_only_where_there_is_something_to_find() -> None:
    assert plan(ToolOptions()).reader() is None
    assert plan(options(choice="none")).reader() is None
    assert plan(options()).reader() is not None
    assert plan(options(), tool_call_parser="none").reader() is None
    assert plan(ToolOptions(), reasoning_parser="think").reader() is not None


def test_reasoning_that_the_prompt_or_a_continued_answer_has_begun_goes_on() -> None:
    style = AnswerStyle(demo_tokenizer(), ServerConfig(reasoning_parser="think"))
    opened = style.plan(ToolOptions(), SamplingParams(), [*PROMPT, *demo_tokenizer().encode("<think>\n")])
    assert opened.is_open
    assert not style.plan(ToolOptions(), SamplingParams(), PROMPT).is_open
    assert style.plan(ToolOptions(), SamplingParams(), PROMPT, continued="<think>Hm").is_open
    assert not style.plan(ToolOptions(), SamplingParams(), PROMPT, continued="<think>Hm</think>So").is_open


def test_unknown_parsers_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="unknown tool parser 'x'"):
        AnswerStyle(demo_tokenizer(), ServerConfig(tool_call_parser="x"))
    with pytest.raises(ConfigError, match="unknown reasoning parser 'x'"):
        ServerState(AsyncEngine(EngineConfig()), Config(server=ServerConfig(reasoning_parser="x")))
