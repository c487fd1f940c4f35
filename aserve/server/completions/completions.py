"""POST /v1/completions."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from aserve.request import Request
from aserve.server.answer_head import AnswerHead
from aserve.server.collect_sink import CollectSink
from aserve.server.completions.completion_frames import CompletionFrames, EchoedPrompt
from aserve.server.echo_sink import EchoSink
from aserve.server.errors import blaming
from aserve.server.generation import collect, send_json, stream
from aserve.server.json_body import read_json
from aserve.server.logprobs import CompletionLogprobs, join_completion_logprobs
from aserve.server.prompts import OnePrompt, parse_prompts
from aserve.server.schema import AnswerOptions, parse_completion
from aserve.server.state import ServerState
from aserve.server.structured_request import prepare_grammar
from aserve.server.usage import UsageTally


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice: what the engine is asked, and what its answer repeats and reports."""

    request: Request
    echo: EchoedPrompt
    logprobs: CompletionLogprobs | None


class Completions:
    """The endpoint as an ASGI application. Choices are numbered by prompt, then by ``n``."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state = self._state
        vocab_size = state.engine.limits.vocab_size
        body = await read_json(scope, receive, state.max_body_bytes)
        fields, options = parse_completion(body, vocab_size)
        await prepare_grammar(state.engine, options.params, body)
        head = AnswerHead("cmpl", "text_completion", state.check_model(options.model), options, UsageTally(options.n))
        prompts = parse_prompts(fields.prompt, options.n, vocab_size)
        with blaming("prompt"):
            token_ids = [tuple(await state.engine.encode(prompt)) for prompt in prompts]
            texts = [""] * len(prompts)
            if fields.echo:
                texts = await self._texts(prompts, skip_special_tokens=options.params.skip_special_tokens)
            choices = [
                Choice(
                    request=head.request(ids, prompt * options.n + choice),
                    echo=EchoedPrompt(texts[prompt], ids),
                    logprobs=self._shaper(options),
                )
                for prompt, ids in enumerate(token_ids)
                for choice in range(options.n)
            ]
            await self._answer(head, choices, scope, send)

    async def _answer(self, head: AnswerHead, choices: list[Choice], scope: Scope, send: Send) -> None:
        requests = [choice.request for choice in choices]
        if head.options.is_streamed:
            builders = [CompletionFrames(head, place, one.echo, one.logprobs) for place, one in enumerate(choices)]
            await stream(self._state, scope, send, requests, builders, head.usage_chunk, EchoSink)
            return
        sinks = await collect(self._state, scope, requests)
        if head.options.params.logprobs is None:
            answer = _render(head, choices, sinks)
        else:
            answer = await asyncio.to_thread(_render, head, choices, sinks)
        await send_json(send, answer)

    async def _texts(self, prompts: Sequence[OnePrompt], *, skip_special_tokens: bool) -> list[str]:
        """Return the prompts as text; many long ones that came as token ids would hold up the loop."""
        decode = self._state.engine.tokenizer.decode

        def decode_all() -> list[str]:
            return [prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens) for prompt in prompts]

        return await asyncio.to_thread(decode_all)

    def _shaper(self, options: AnswerOptions) -> CompletionLogprobs | None:
        if options.params.logprobs is None:
            return None
        return CompletionLogprobs(self._state.engine.tokenizer, skip_special_tokens=options.params.skip_special_tokens)


def _render(head: AnswerHead, choices: Sequence[Choice], sinks: Sequence[CollectSink]) -> bytes:
    shown = [
        _choice(head, place, choice, sink) for place, (choice, sink) in enumerate(zip(choices, sinks, strict=True))
    ]
    return orjson.dumps({**head.fields(), "choices": shown, "usage": head.tally.body()})


def _choice(head: AnswerHead, place: int, choice: Choice, sink: CollectSink) -> dict[str, Any]:
    last = sink.last
    assert last is not None  # a request that has not failed ends with an output
    head.tally.note(place, last)
    logprobs = None
    if choice.logprobs is not None:
        prompt = choice.echo.logprobs(choice.logprobs, sink.prompt_logprobs)
        logprobs = join_completion_logprobs((prompt, choice.logprobs.output(sink.logprobs)))
    return {
        "index": place,
        "text": choice.echo.text + sink.text,
        "logprobs": logprobs,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
    }
