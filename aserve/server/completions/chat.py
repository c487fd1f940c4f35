"""POST /v1/chat/completions."""

import asyncio
from dataclasses import replace
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from aserve.request import Request, SamplingParams
from aserve.server.answer_head import AnswerHead
from aserve.server.answer_style import AnswerPlan
from aserve.server.collect_sink import CollectSink
from aserve.server.completions.chat_frames import ChatFrames
from aserve.server.completions.chat_message import finish_reason_of, render_message
from aserve.server.completions.chat_tools import read_tool_options
from aserve.server.errors import blaming
from aserve.server.generation import collect, send_json, stream
from aserve.server.json_body import read_json
from aserve.server.logprobs import TokenNames, chat_logprobs
from aserve.server.reasoning import read_effort
from aserve.server.schema import ChatBody, parse_chat
from aserve.server.state import ServerState
from aserve.server.structured_request import prepare_grammar
from aserve.server.usage import UsageTally
from aserve.tokenizer.messages import message_text


class ChatCompletions:
    """The endpoint as an ASGI application."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state = self._state
        body = await read_json(scope, receive, state.max_body_bytes)
        fields, options = parse_chat(body, state.engine.limits.vocab_size)
        model = state.check_model(options.model)
        await prepare_grammar(state.engine, options.params, body)
        with blaming("messages"):
            prompt_ids, plan = await self._plan(fields, options.params)
            options = replace(options, params=plan.params)
            kind = "chat.completion.chunk" if options.is_streamed else "chat.completion"
            head = AnswerHead("chatcmpl", kind, model, options, UsageTally(options.n))
            requests = [head.request(prompt_ids, choice) for choice in range(options.n)]
            await self._answer(head, requests, plan, scope, send)

    async def _plan(self, fields: ChatBody, params: SamplingParams) -> tuple[tuple[int, ...], AnswerPlan]:
        """Encode the messages and decide how they are answered; everything that can be wrong is told here."""
        tools = read_tool_options(fields.tools, fields.tool_choice, is_parallel=fields.parallel_tool_calls)
        effort = read_effort(fields.reasoning_effort, fields.reasoning)
        prompt_ids = await self._state.engine.encode(
            fields.messages,
            tools=tools.for_template(),
            continue_final_message=fields.continue_final_message,
            template_kwargs={**effort, **fields.chat_template_kwargs},  # what the client sets itself wins
        )
        continued = message_text(fields.messages[-1]) if fields.continue_final_message else None
        plan = self._state.answer_style.plan(
            tools,
            params,
            prompt_ids,
            continued=continued,
            max_reasoning_tokens=fields.thinking_token_budget,
        )
        await prepare_grammar(self._state.engine, plan.params, {})  # what is wrong now is wrong with the tools
        return tuple(prompt_ids), plan

    async def _answer(
        self, head: AnswerHead, requests: list[Request], plan: AnswerPlan, scope: Scope, send: Send
    ) -> None:
        params = head.options.params
        names = TokenNames(self._state.engine.tokenizer, hides_special=params.skip_special_tokens)
        readers = [plan.reader() for _ in requests]
        if head.options.is_streamed:
            builders = [ChatFrames(head, choice, names, reader) for choice, reader in enumerate(readers)]
            await stream(self._state, scope, send, requests, builders, head.usage_chunk)
            return
        sinks = await collect(self._state, scope, requests, readers)
        if params.logprobs is None:
            answer = _render(head, sinks, names)
        else:
            answer = await asyncio.to_thread(_render, head, sinks, names)
        await send_json(send, answer)


def _render(head: AnswerHead, sinks: list[CollectSink], names: TokenNames) -> bytes:
    choices = [_choice(head, choice, sink, names) for choice, sink in enumerate(sinks)]
    return orjson.dumps({**head.fields(), "choices": choices, "usage": head.tally.body()})


def _choice(head: AnswerHead, choice: int, sink: CollectSink, names: TokenNames) -> dict[str, Any]:
    last, reader = sink.last, sink.reader
    assert last is not None  # a request that has not failed ends with an output
    assert last.finish_reason is not None
    head.tally.note(choice, last)
    if reader is not None:
        head.tally.note_reasoning(choice, reader.num_reasoning_tokens)
    wants_logprobs = head.options.params.logprobs is not None
    return {
        "index": choice,
        "message": render_message(sink.text, reader),
        "logprobs": chat_logprobs(sink.logprobs, names) if wants_logprobs else None,
        "finish_reason": finish_reason_of(last.finish_reason, reader),
        "stop_reason": last.stop_reason,
    }
