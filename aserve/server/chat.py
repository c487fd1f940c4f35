"""POST /v1/chat/completions."""

import asyncio
import time
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from aserve.request import Request
from aserve.server.answer_head import AnswerHead
from aserve.server.chat_frames import ChatFrames
from aserve.server.collect_sink import CollectSink
from aserve.server.generation import collect, send_json, stream
from aserve.server.json_body import read_json
from aserve.server.logprobs import TokenNames, chat_logprobs
from aserve.server.schema import parse_chat
from aserve.server.state import ServerState
from aserve.server.usage import UsageTally


class ChatCompletions:
    """The endpoint as an ASGI application."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state = self._state
        body = await read_json(scope, receive, state.max_body_bytes)
        messages, options = parse_chat(body, state.engine.limits.vocab_size)
        model = state.check_model(options.model)
        prompt_ids = tuple(await state.engine.encode(messages))
        kind = "chat.completion.chunk" if options.is_streamed else "chat.completion"
        head = AnswerHead("chatcmpl", kind, model, options, UsageTally(options.n))
        requests = [_request(head, prompt_ids, choice) for choice in range(options.n)]
        names = TokenNames(state.engine.tokenizer, hides_special=options.params.skip_special_tokens)
        if options.is_streamed:
            builders = [ChatFrames(head, choice, names) for choice in range(options.n)]
            await stream(state, scope, send, requests, builders, head.usage_chunk)
            return
        sinks = await collect(state, scope, requests)
        if options.params.logprobs is None:
            answer = _answer(head, sinks, names)
        else:
            answer = await asyncio.to_thread(_answer, head, sinks, names)
        await send_json(send, answer)


def _request(head: AnswerHead, prompt_ids: tuple[int, ...], choice: int) -> Request:
    return Request(
        request_id=head.request_id(choice),
        prompt_token_ids=prompt_ids,
        params=head.options.params_of(choice),
        priority=head.options.priority,
        arrival_time_s=time.monotonic(),
    )


def _answer(head: AnswerHead, sinks: list[CollectSink], names: TokenNames) -> bytes:
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
