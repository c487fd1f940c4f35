"""gpt-oss behind the endpoints: its template, its channels, the tokens that end its answers; a scripted engine."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from doubles_harmony import harmony_tokenizer
from doubles_http import LIMITS, events, in_loop, live_server
from doubles_parsing import TOOLS
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseFunctionToolCall

from aserve.config import ServerConfig
from aserve.request import GrammarSpec, SamplingParams
from aserve.scheduler.limits import Limits
from aserve.server.answer_style import AnswerStyle
from aserve.server.tools import ToolOptions
from aserve.structured.compile import GrammarCompiler
from aserve.tokenizer.tokenizer import Tokenizer

DEMO_TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
CITY = '{"city": "Prague"}'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = f"{THOUGHT}<|channel|>final<|message|>Yes."
CALL = f"{THOUGHT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}"
BARE_CALL = f"{THOUGHT} to=functions.get_time<|channel|>commentary json<|message|>"
PREAMBLE = f"{THOUGHT}<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return harmony_tokenizer(tmp_path_factory.mktemp("harmony"))


@pytest.fixture
def limits(tokenizer: Tokenizer) -> Limits:
    return dataclasses.replace(LIMITS, vocab_size=tokenizer.vocab_size)


class Answers:
    """A script that gives an answer a turn and keeps the prompts; beyond an end that is not seen it shouts on."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self.prompts: list[str] = []
        self._tokenizer = tokenizer
        self._answers = [tokenizer.encode(text) for text in texts]
        self._start = 0

    def __call__(self, tokens: Sequence[int], position: int) -> int:
        spoken = position - self._start
        if not self.prompts or not self._goes_on(tokens[self._start : position]):
            self.prompts.append(self._tokenizer.decode(tokens[:position], skip_special_tokens=False))
            self._start, spoken = position, 0
        answer = self._answers[len(self.prompts) - 1]
        return answer[spoken] if spoken < len(answer) else self._tokenizer.encode("!")[0]

    def _goes_on(self, said: Sequence[int]) -> bool:
        answer = self._answers[len(self.prompts) - 1]
        return bool(said) and list(said[: len(answer)]) == answer[: len(said)]


ENDINGS = [
    (FINAL + "<|return|>", "stop", "Yes.", []),
    (FINAL + "<|endoftext|>", "stop", "Yes.", []),
    (CALL + "<|call|>", "tool_calls", None, [("get_weather", CITY)]),
    (BARE_CALL + "<|call|>", "tool_calls", None, [("get_time", "{}")]),
    (f"{PREAMBLE}{CALL.removeprefix(THOUGHT)}<|call|>", "tool_calls", "Let me see.", [("get_weather", CITY)]),
]


@pytest.mark.parametrize(("answer", "reason", "content", "calls"), ENDINGS)
def test_each_end_token_ends_the_answer(
    answer: str, reason: str, content: str | None, calls: list[Any], tokenizer: Tokenizer, limits: Limits
) -> None:
    @in_loop
    async def run() -> None:
        script = Answers(tokenizer, [answer, answer])
        async with live_server(script, limits=limits, tokenizer=tokenizer) as live:
            reply = await live.chat(tools=DEMO_TOOLS, reasoning_effort="high")
            plain = ChatCompletion.model_validate(reply.json(), strict=True)
            assert "\n\nReasoning: high\n\n" in script.prompts[0]
            assert "type get_weather = (_: {\n" in script.prompts[0]
            assert plain.usage is not None
            assert plain.usage.completion_tokens == len(tokenizer.encode(answer))
            state = ChatCompletionStreamState()
            for chunk in events((await live.chat(tools=DEMO_TOOLS, stream=True)).text):
                state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
            for choice in (plain.choices[0], state.current_completion_snapshot.choices[0]):
                message: Any = choice.message
                assert (choice.finish_reason, message.content or None) == (reason, content)
                assert message.model_extra["reasoning_content"] == "Hm."
                assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == calls

    run()


def test_a_loop_of_responses_keeps_the_reasoning_behind_a_call(tokenizer: Tokenizer, limits: Limits) -> None:
    """In the turn that answers the call; when a final answer has followed, it is gone."""
    script = Answers(tokenizer, [CALL + "<|call|>", FINAL + "<|return|>", FINAL + "<|return|>"])
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in TOOLS.items()]

    async def respond(live: Any, previous: Response | None, turn: Any) -> Response:
        fields = {"previous_response_id": previous.id} if previous else {"instructions": "Be kind."}
        reply = await live.post("/v1/responses", input=turn, tools=tools, reasoning={"effort": "low"}, **fields)
        return Response.model_validate(reply.json(), strict=True)

    @in_loop
    async def run() -> None:
        async with live_server(script, limits=limits, tokenizer=tokenizer) as live:
            asked = await respond(live, None, "Weather?")
            assert [item.type for item in asked.output] == ["reasoning", "function_call"]
            call = asked.output[1]
            assert isinstance(call, ResponseFunctionToolCall)
            assert (call.name, json.loads(call.arguments)) == ("get_weather", json.loads(CITY))
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            answered = await respond(live, asked, [result])
            assert answered.output_text == "Yes."
            await respond(live, answered, "Thanks")

    run()
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    called = (
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{CITY}<|call|>"
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
    )
    first, second, third = script.prompts
    assert "# Instructions\n\nBe kind." in first
    assert first.endswith("<|start|>user<|message|>Weather?<|end|><|start|>assistant")
    assert second.endswith(f"<|start|>user<|message|>Weather?<|end|>{thought}{called}<|start|>assistant")
    assert third.endswith(
        f"<|start|>user<|message|>Weather?<|end|>{called}<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
        "<|start|>user<|message|>Thanks<|end|><|start|>assistant"
    )


def test_a_format_holds_behind_the_reasoning_and_in_a_continued_answer(tokenizer: Tokenizer) -> None:
    """A continued answer is within its final message already, where no header may come."""
    style, compiler = AnswerStyle(tokenizer, ServerConfig()), GrammarCompiler(tokenizer)
    params = SamplingParams(grammar=GrammarSpec("regex", r"\d\}"))

    def allows(text: str, continued: str | None) -> bool:
        grammar = style.plan(ToolOptions(), params, [], continued=continued).params.grammar
        assert grammar is not None
        matcher, ids = compiler.compile(grammar).start(), tokenizer.encode(text)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    answer = "<|channel|>final<|message|>4}"
    assert allows(THOUGHT + answer, None)
    assert allows(answer, None)
    assert not allows("4}", None)
    assert allows("4}", '{"n": ')
    assert not allows(answer, '{"n": ')
