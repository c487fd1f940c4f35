"""POST /v1/completions."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from aserve.errors import ClientError
from aserve.request import Request
from aserve.server.answer_head import AnswerHead
from aserve.server.collect_sink import CollectSink
from aserve.server.completion_frames import CompletionFrames, EchoedPrompt
from aserve.server.generation import collect, send_json, stream
from aserve.server.json_body import read_json
from aserve.server.logprobs import CompletionLogprobs, join_completion_logprobs
from aserve.server.prompts import OnePrompt, parse_prompts
from aserve.server.schema import AnswerOptions, parse_completion
from aserve.server.state import ServerState
from aserve.server.usage import UsageTally


class Completions:
    """The endpoint as an ASGI application. Choices are numbered by prompt, then by ``n``."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state = self._state
        vocab_size = state.engine.limits.vocab_size
        fields, options = parse_completion(await read_json(scope, receive, state.max_body_bytes), vocab_size)
        model = state.check_model(options.model)
        prompts = parse_prompts(fields.prompt, options.n, vocab_size)
        token_ids = [await self._encode(prompt) for prompt in prompts]
        head = AnswerHead("cmpl", "text_completion", model, options, UsageTally(options.n))
        requests = _requests(head, token_ids)
        echoes = [
            self._echo(prompt, ids, options) if fields.echo else EchoedPrompt()
            for prompt, ids in zip(prompts, token_ids, strict=True)
        ]
        shapers = [self._shaper(options) for _ in requests]
        if options.is_streamed:
            builders = [
                CompletionFrames(head, choice, echoes[choice // options.n], shaper)
                for choice, shaper in enumerate(shapers)
            ]
            await stream(state, scope, send, requests, builders, head.usage_chunk)
            return
        sinks = await collect(state, scope, requests)
        if options.params.logprobs is None:
            answer = _answer(head, sinks, echoes, shapers)
        else:
            answer = await asyncio.to_thread(_answer, head, sinks, echoes, shapers)
        await send_json(send, answer)

    async def _encode(self, prompt: OnePrompt) -> tuple[int, ...]:
        token_ids = tuple(await self._state.engine.encode(prompt))
        if not token_ids:
            raise ClientError("a prompt has no tokens", param="prompt")
        return token_ids

    def _echo(self, prompt: OnePrompt, token_ids: tuple[int, ...], options: AnswerOptions) -> EchoedPrompt:
        if isinstance(prompt, str):
            return EchoedPrompt(prompt, token_ids)
        text = self._state.engine.tokenizer.decode(prompt, options.params.skip_special_tokens)
        return EchoedPrompt(text, token_ids)

    def _shaper(self, options: AnswerOptions) -> CompletionLogprobs | None:
        if options.params.logprobs is None:
            return None
        return CompletionLogprobs(self._state.engine.tokenizer, skip_special_tokens=options.params.skip_special_tokens)


def _requests(head: AnswerHead, token_ids: Sequence[tuple[int, ...]]) -> list[Request]:
    options = head.options
    return [
        Request(
            request_id=head.request_id(prompt * options.n + choice),
            prompt_token_ids=ids,
            params=options.params_of(choice),
            priority=options.priority,
            arrival_time_s=time.monotonic(),
        )
        for prompt, ids in enumerate(token_ids)
        for choice in range(options.n)
    ]


def _answer(
    head: AnswerHead,
    sinks: Sequence[CollectSink],
    echoes: Sequence[EchoedPrompt],
    shapers: Sequence[CompletionLogprobs | None],
) -> bytes:
    n = head.options.n
    choices = [
        _choice(head, choice, sink, echoes[choice // n], shaper)
        for choice, (sink, shaper) in enumerate(zip(sinks, shapers, strict=True))
    ]
    return orjson.dumps({**head.fields(), "choices": choices, "usage": head.tally.body()})


def _choice(
    head: AnswerHead, choice: int, sink: CollectSink, echo: EchoedPrompt, shaper: CompletionLogprobs | None
) -> dict[str, Any]:
    last = sink.last
    assert last is not None  # a request that has not failed ends with an output
    head.tally.note(choice, last)
    logprobs = None
    if shaper is not None:
        prompt = echo.logprobs(shaper, sink.prompt_logprobs)
        logprobs = join_completion_logprobs((prompt, shaper.output(sink.logprobs)))
    return {
        "index": choice,
        "text": echo.text + sink.text,
        "logprobs": logprobs,
        "finish_reason": last.finish_reason,
    }
