"""POST /v1/chat/completions."""

import asyncio
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from aserve.request import Request
from aserve.server.answer_head import AnswerHead
from aserve.server.chat_frames import ChatFrames
from aserve.server.collect_sink import CollectSink
from aserve.server.errors import blaming
from aserve.server.generation import collect, send_json, stream
from aserve.server.json_body import read_json
from aserve.server.logprobs import TokenNames, chat_logprobs
from aserve.server.schema import parse_chat
from aserve.server.state import ServerState
from aserve.server.structured_request import prepare_grammar
from aserve.server.usage import UsageTally


class ChatCompletions:
    """The endpoint as an ASGI application."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state = self._state
        body = await read_json(scope, receive, state.max_body_bytes)
        fields, options = parse_chat(body, state.engine.limits.vocab_size)
        await prepare_grammar(state.engine, options.params, body)
        kind = "chat.completion.chunk" if options.is_streamed else "chat.completion"
        head = AnswerHead("chatcmpl", kind, state.check_model(options.model), options, UsageTally(options.n))
        with blaming("messages"):
            prompt_ids = tuple(
                await state.engine.encode(
                    fields.messages,
                    continue_final_message=fields.continue_final_message,
                    template_kwargs=fields.chat_template_kwargs,
                )
            )
            await self._answer(head, [head.request(prompt_ids, choice) for choice in range(options.n)], scope, send)

    async def _answer(self, head: AnswerHead, requests: list[Request], scope: Scope, send: Send) -> None:
        params = head.options.params
        names = TokenNames(self._state.engine.tokenizer, hides_special=params.skip_special_tokens)
        if head.options.is_streamed:
            builders = [ChatFrames(head, choice, names) for choice in range(len(requests))]
            await stream(self._state, scope, send, requests, builders, head.usage_chunk)
            return
        sinks = await collect(self._state, scope, requests)
        if params.logprobs is None:
            answer = _render(head, sinks, names)
        else:
            answer = await asyncio.to_thread(_render, head, sinks, names)
        await send_json(send, answer)


def _render(head: AnswerHead, sinks: list[CollectSink], names: TokenNames) -> bytes:
    choices = [_choice(head, choice, sink, names) for choice, sink in enumerate(sinks)]
    return orjson.dumps({**head.fields(), "choices": choices, "usage": head.tally.body()})


def _choice(head: AnswerHead, choice: int, sink: CollectSink, names: TokenNames) -> dict[str, Any]:
    last = sink.last
    assert last is not None  # a request that has not failed ends with an output
    head.tally.note(choice, last)
    wants_logprobs = head.options.params.logprobs is not None
    return {
        "index": choice,
        "message": {"role": "assistant", "content": sink.text, "refusal": None},
        "logprobs": chat_logprobs(sink.logprobs, names) if wants_logprobs else None,
        "finish_reason": last.finish_reason,
    }
