"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol."""

from functools import partial
from typing import Any

import orjson
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from aserve.parsing.answer_reader import AnswerReader
from aserve.request import Request
from aserve.server.errors import blaming
from aserve.server.generation import StreamForm, collect, send_json, stream
from aserve.server.json_body import read_json
from aserve.server.messages.answer import MessagesAnswer
from aserve.server.messages.content import render_content
from aserve.server.messages.errors import PREFIX
from aserve.server.messages.frames import PING, MessagesFrames
from aserve.server.messages.schema import MessagesRequest, format_field, parse_count, parse_message
from aserve.server.models import JsonEndpoint
from aserve.server.state import ServerState
from aserve.server.structured_request import prepare_grammar


def messages_routes(state: ServerState) -> list[BaseRoute]:
    """Return the routes of the protocol."""
    return [
        Route(PREFIX, CreateMessage(state), methods=["POST"]),
        Route(f"{PREFIX}/count_tokens", JsonEndpoint(partial(count_tokens, state)), methods=["POST"]),
    ]


class CreateMessage:
    """The endpoint as an ASGI application."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state = self._state
        body = await read_json(scope, receive, state.max_body_bytes)
        limits = state.engine.limits
        fields = parse_message(body, limits.vocab_size)
        answer = MessagesAnswer(fields, state.check_model(fields.model), limits.max_model_len)
        await prepare_grammar(state.engine, fields.params, body, format_field(body))
        with blaming("messages"):
            prompt_ids = tuple(await _encode(state, fields))
            plan = state.answer_style.plan(
                fields.tools,
                fields.params,
                prompt_ids,
                continued=fields.continued,
                max_reasoning_tokens=fields.thinking_budget,
            )
            await prepare_grammar(state.engine, plan.params, {})  # what is wrong now is wrong with the tools
            request = answer.engine_request(prompt_ids, plan.params)
            if fields.is_streamed:
                await self._stream(answer, request, plan.reader(), scope, send)
            else:
                await self._answer(answer, request, plan.reader(), scope, send)

    async def _stream(
        self, answer: MessagesAnswer, request: Request, reader: AnswerReader | None, scope: Scope, send: Send
    ) -> None:
        frames = MessagesFrames(answer, scope["state"]["request_id"], reader)
        form = StreamForm(frames.opening(len(request.prompt_token_ids)), keep_alive=PING, ending=b"")
        await stream(self._state, scope, send, [request], [frames], form=form)

    async def _answer(
        self, answer: MessagesAnswer, request: Request, reader: AnswerReader | None, scope: Scope, send: Send
    ) -> None:
        (sink,) = await collect(self._state, scope, [request], [reader])
        assert sink.last is not None  # a request that has not failed ends with an output
        content = render_content(sink.text, reader, shows_thinking=answer.request.shows_thinking)
        await send_json(send, orjson.dumps(answer.finished(content, sink.last, reader)))


async def count_tokens(state: ServerState, scope: Scope, receive: Receive) -> dict[str, Any]:
    """Return how long the prompt of a message would be."""
    body = await read_json(scope, receive, state.max_body_bytes)
    fields = parse_count(body, state.engine.limits.vocab_size)
    state.check_model(fields.model)
    with blaming("messages"):
        return {"input_tokens": len(await _encode(state, fields))}


async def _encode(state: ServerState, fields: MessagesRequest) -> list[int]:
    return await state.engine.encode(
        fields.messages,
        tools=fields.tools.for_template(),
        continue_final_message=fields.continued is not None,
        template_kwargs=fields.template_kwargs,
    )
