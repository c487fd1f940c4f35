"""Calls and reasoning of model families whose markers are control tokens, from a chat's prompt to its answer."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from doubles_http import LIMITS, events, in_loop, live_server
from doubles_parsing import TOOLS, WEATHER
from doubles_tokenizer import make_tokenizer_with_markers
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from aserve.config import ServerConfig
from aserve.request import SamplingParams
from aserve.server.answer_style import AnswerStyle
from aserve.server.tools import ToolOptions, check_function
from aserve.structured.compile import GrammarCompiler
from aserve.tokenizer.tokenizer import Tokenizer

BAR, LOW = "\uff5c", "\u2581"
CITY = '{"city": "Prague", "days": 3}'
TOOL_LIST = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def ds(words: str) -> str:
    return f"<{BAR}{words.replace(' ', LOW)}{BAR}>"


DEEPSEEK = [ds(f"tool {words}") for words in ("calls begin", "call begin", "sep", "call end", "calls end")]
CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END = DEEPSEEK
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family's template says of calls, its control tokens, an answer with reasoning, and the calls alone."""

    template: str
    markers: Sequence[str]
    reasoning: str
    calls: str
    names: Sequence[str] = ("get_weather", "get_time")
    prompt_end: str = ""


FAMILIES = {
    "mistral": Family(
        "{# [TOOL_CALLS] and [THINK] #}",
        ["[TOOL_CALLS]", "[THINK]", "[/THINK]"],
        "[THINK]Hm.[/THINK]",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "get_time", "arguments": {{}}}}]',
    ),
    "mistral from version 11 on": Family(
        "{# [TOOL_CALLS] and [ARGS] and [THINK] #}",
        ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
        "[THINK]Hm.[/THINK]",
        f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]get_time[ARGS]{{}}",
    ),
    "deepseek r1": Family(
        f"{{# {CALL_BEGIN} ```json and </think> #}}",
        DEEPSEEK,
        "Hm.</think>\n\n",
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}get_weather\n```json\n{CITY}\n```{CALL_END}\n"
        f"{CALL_BEGIN}function{SEP}get_time\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        prompt_end="<think>\n",
    ),
    "deepseek v3.1": Family(
        f"{{# {CALL_BEGIN} and </think> #}}",
        [*DEEPSEEK, "<think>", "</think>"],
        "<think>Hm.</think>",
        f"{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEP}{CITY}{CALL_END}{CALL_BEGIN}get_time{SEP}{{}}{CALL_END}{CALLS_END}",
    ),
    "gpt-oss": Family(
        "{# <|channel|> #}",
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}",
        names=("get_weather",),
        prompt_end="<|start|>assistant",
    ),
    "qwen 3": Family(
        "{# <tool_call> and <think> #}",
        [],
        "<think>\nHm.\n</think>\n\n",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    ),
    "llama 3": Family(
        "{# <|python_tag|> and <think> #}",
        ["<|python_tag|>"],
        "<think>Hm.</think>\n",
        f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "get_time", "parameters": {{}}}}',
    ),
}
DEMO_TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]


def make_tokenizer(family: Family, folder: Path) -> Tokenizer:
    template = f"{family.template}{TOOL_LIST}{TURNS}Answer:{family.prompt_end}"
    return make_tokenizer_with_markers(folder, template, family.markers)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_and_reasoning_are_told_apart(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family, tmp_path)
    answer = tokenizer.encode(family.reasoning + family.calls)
    limits = dataclasses.replace(LIMITS, vocab_size=tokenizer.vocab_size)
    prompt_len = len(tokenizer.encode_chat([{"role": "user", "content": "hi"}], tools=_told(tokenizer)))

    def script(tokens: Sequence[int], position: int) -> int:
        spoken = position - prompt_len
        return answer[spoken] if spoken < len(answer) else 257

    @in_loop
    async def run() -> None:
        async with live_server(script, limits=limits, tokenizer=tokenizer) as live:
            plain = ChatCompletion.model_validate((await live.chat(tools=DEMO_TOOLS)).json(), strict=True)
            assert plain.usage is not None
            assert plain.usage.prompt_tokens == prompt_len
            state = ChatCompletionStreamState()
            for chunk in events((await live.chat(tools=DEMO_TOOLS, stream=True)).text):
                state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
            for choice in (plain.choices[0], state.current_completion_snapshot.choices[0]):
                _check(choice, family)

    run()


def _told(tokenizer: Tokenizer) -> Any:
    return ToolOptions(tools=tuple(check_function("t", name=n, parameters=s) for n, s in TOOLS.items())).for_template()


def _check(choice: Any, family: Family) -> None:
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or "") == ""
    assert choice.message.model_extra["reasoning_content"] == choice.message.model_extra["reasoning"] == "Hm."
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("get_weather", json.loads(CITY)), ("get_time", {})][: len(family.names)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_required_call_is_written_in_the_familys_own_tokens(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family, tmp_path)
    functions = [check_function("t", name=name, parameters=schema) for name, schema in TOOLS.items()]
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    required = ToolOptions(tools=tuple(functions), choice="required")
    plan = AnswerStyle(tokenizer, ServerConfig()).plan(required, SamplingParams(), prompt)
    assert plan.params.grammar is not None
    compiler = GrammarCompiler(tokenizer)

    def allows(text: str) -> bool:
        matcher = compiler.compile(plan.params.grammar).start()  # type: ignore[arg-type]
        ids = tokenizer.encode(text)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    assert allows(family.reasoning + family.calls)
    assert allows(family.calls) is not family.prompt_end.startswith("<think>")
    assert not allows(family.reasoning + "Hello")
    assert not allows(family.reasoning + family.calls.replace("city", "town"))
    assert not allows(family.reasoning)
    strict = check_function("t", name="get_weather", parameters=WEATHER, strict=True)
    held = AnswerStyle(tokenizer, ServerConfig()).plan(ToolOptions(tools=(strict,)), SamplingParams(), prompt)
    assert held.params.grammar is not None
    matcher = compiler.compile(held.params.grammar).start()
    wrong = tokenizer.encode(family.reasoning + family.calls.replace("city", "town"))
    assert matcher.validate_tokens(wrong) < len(wrong)
