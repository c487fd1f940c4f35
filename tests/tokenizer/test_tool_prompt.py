"""Tools for templates that know of none, and prompts of templates that do, against transformers."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from aserve.errors import ClientError
from aserve.tokenizer.chat_template import ChatTemplate
from aserve.tokenizer.control_tokens import ControlToken, ControlTokens, unmark

CONTROL = ControlTokens([ControlToken(0, "<|im_start|>"), ControlToken(1, "<|im_end|>")])
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The <weather> of a city & its 'mood'.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Plzeň"}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL], "reasoning_content": "I must look."},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_1", "content": "rainy"},
]


def render(source: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    template = ChatTemplate({"default": source}, {}, CONTROL)
    return unmark(
        template.render(
            messages, tools=tools, add_generation_prompt=True, continue_final_message=False, max_chars=10**6
        )
    )


def test_a_template_without_tools_gets_them_as_text() -> None:
    text = render(PLAIN, TURNS, TOOLS)
    head, _, turns = text.partition("[user]")
    assert head.startswith("[system]Be brief.\n\n")
    described = head.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in described.split("\n")] == TOOLS
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Plzeň"}}\n</tool_call>'
    results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response>"
    assert turns == f"Weather?[assistant]{call}\n{call}[user]{results}[assistant]"
    assert render(PLAIN, TURNS[1:2], TOOLS).startswith("[system]You can call functions.")
    assert render(PLAIN, TURNS[:2], TOOLS[:0]) == "[system]Be brief.[user]Weather?[assistant]"


def test_arguments_too_deep_to_be_written_are_refused() -> None:
    deep = {**CALL, "function": {"name": "f", "arguments": '{"a":' + "[" * 1000 + "]" * 1000 + "}"}}
    with pytest.raises(ClientError, match="nested too deeply"):
        render(PLAIN, [TURNS[1], {"role": "assistant", "tool_calls": [deep]}])


HERMES = """
{%- if tools %}{{- '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}
{%- endif %}{{- "# Tools\\n\\n<tools>" }}{% for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{% endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content is string %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}{% else %}
{{- tool_call.arguments | tojson }}{% endif %}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{% endif %}
{%- elif message.role != "system" %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
LLAMA = """
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}{{- first }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "parameters": ' }}{{- call.function.arguments | tojson }}{{- "}" }}
{%- endfor %}{{- "<|eot_id|>" }}
{%- elif message.role == "tool" or message.role == "ipython" %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{% endif %}
{%- elif not (message.role == 'system') %}{{- message.role + ': ' + message['content'] | trim }}{% endif %}
{%- endfor %}"""
MISTRAL = """
{%- for message in messages %}
{%- if message["role"] == "user" %}
{%- if tools is not none and (message == messages[-1] or true) %}{{- "[AVAILABLE_TOOLS] [" }}
{%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.items() if key != "return" %}
{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- "}}" }}{%- endfor %}
{{- "][/AVAILABLE_TOOLS]" }}{% endif %}
{{- "[INST] " + message["content"] + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}
{{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- "]" }}
{%- elif message["role"] == "tool" %}{{- '[TOOL_RESULTS] {"content": ' + message.content|string }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}{% endif %}{%- endfor %}"""


@pytest.mark.parametrize("source", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_templates_with_tools_render_as_in_transformers(source: str, tools: Any) -> None:
    known = [dict(turn) for turn in TURNS]  # transformers' templates are given objects and no null
    known[2] = {**TURNS[2], "content": "", "tool_calls": [
        {**CALL, "function": {"name": "get_weather", "arguments": {"city": "Plzeň"}}} for _ in range(2)
    ]}  # fmt: skip
    expected, _ = render_jinja_template([known], tools=tools, chat_template=source, add_generation_prompt=True)
    assert render(source, TURNS, tools) == expected[0]


def test_reasoning_is_given_back_under_the_name_that_templates_know() -> None:
    turns = [{"role": "assistant", "content": "5", "reasoning": "Hm."}]
    assert render("{{ messages[0].reasoning_content }}", turns) == "Hm."
    asked = [{"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm."}]
    source = "{% if tools %}{% endif %}{{ messages[0].thinking }}"  # gpt-oss's, which must not stand beside content
    assert render(source, asked) == "Hm."
    assert render(source, turns) == ""


ADDING = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '>' + c['function']['arguments'] }}{% endfor %}"


def test_arguments_are_text_for_templates_that_add_them_to_text() -> None:
    assert render(ADDING + "{% endfor %}", TURNS) == '>{"city": "Plzeň"}' * 2
    one_system = "{% if messages[1].role == 'system' %}{{ raise_exception('one only') }}{% endif %}"
    assert render(one_system + ADDING + "{% endfor %}", [TURNS[0], *TURNS]) == '>{"city": "Plzeň"}' * 2
    assert render("{{ messages[2].tool_calls[0].function.arguments.city }}", TURNS) == "Plzeň"
    with pytest.raises(ClientError, match="not today"):
        render("{% if tools %}{% endif %}{{ raise_exception('not today') }}", [TURNS[0], *TURNS])


@pytest.mark.parametrize("test", ["m.content is not none", "m['content'] is not none", "not m.content is none"])
def test_a_turn_that_only_calls_has_no_content_for_templates_that_ask(test: str) -> None:
    source = f"{{% for m in messages %}}{{% if {test} %}}[{{{{ m.content }}}}]{{% endif %}}{{% endfor %}}"
    calls = "{% for m in messages if m.tool_calls %}{% endfor %}"
    expected, _ = render_jinja_template([TURNS], chat_template=source + calls)
    assert render(source + calls, TURNS) == expected[0] == "[Be brief.][Weather?][sunny][rainy]"
    assert render("{{ messages[2].content + '.' }}" + calls, TURNS) == "."


ONE_CALL = (  # as the templates of Llama 3 have it
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{{ m.reasoning_content }}{{ m.content }}({{ m.tool_calls[0].function.arguments | tojson }})"
    "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)


def test_parallel_calls_become_turns_for_templates_that_take_one_a_turn() -> None:
    def call(number: int) -> dict[str, Any]:
        return {**CALL, "id": f"call_{number}", "function": {"name": "f", "arguments": f'{{"n": {number}}}'}}

    def result(number: int) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"result {number}"}

    calling = {"role": "assistant", "content": "look.", "reasoning": "I ", "tool_calls": [call(1), call(2), call(3)]}
    thanks = {"role": "user", "content": "Thanks."}
    history = [
        TURNS[1],
        calling,
        result(2),
        result(1),
        result(9),
        thanks,
        {**calling, "tool_calls": [call(4)]},
        result(4),
    ]
    expected = '[Weather?]I look.({"n": 1})[result 1]({"n": 2})[result 2]({"n": 3})[result 9][Thanks.]I look.({"n": 4})'
    assert render(ONE_CALL, history) == f"{expected}[result 4]"
    only = [{**turn, "tool_calls": turn["tool_calls"][:1]} if "tool_calls" in turn else turn for turn in history]
    assert render(ONE_CALL, only).count("I look.") == 2
    refused = ONE_CALL.replace("!= 1", "> 0")
    with pytest.raises(ClientError, match="single tool-calls"):
        render(refused, history)
