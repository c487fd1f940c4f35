"""GET /v1/models and /v1/models/{model}, POST /tokenize and /detokenize."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import orjson
from starlette.types import Receive, Scope, Send

from aserve.errors import ClientError
from aserve.server.completions.chat_tools import read_tools
from aserve.server.errors import blaming
from aserve.server.generation import send_json
from aserve.server.json_body import read_json
from aserve.server.logprobs import TokenNames
from aserve.server.prompts import parse_prompts
from aserve.server.schema import ChatMessages, check_template_use, convert_body
from aserve.server.state import ServerState
from aserve.server.tools import ToolOptions

JsonAnswer = Callable[[Scope, Receive], Awaitable[Any]]


class JsonEndpoint:
    """An ASGI application that sends what ``answer`` returns as JSON."""

    def __init__(self, answer: JsonAnswer) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await send_json(send, orjson.dumps(await self._answer(scope, receive)))


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Text or messages; one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    tools: list[Any] = msgspec.field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True  # to a prompt; messages get what the template writes
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


def model_card(state: ServerState) -> dict[str, Any]:
    """Describe the served model."""
    return {
        "id": state.engine.model_name,
        "object": "model",
        "created": state.created_s,
        "owned_by": "aserve",
        "max_model_len": state.engine.limits.max_model_len,
    }


async def list_models(state: ServerState, scope: Scope, receive: Receive) -> dict[str, Any]:
    """Return the list with the one served model."""
    return {"object": "list", "data": [model_card(state)]}


async def show_model(state: ServerState, scope: Scope, receive: Receive) -> dict[str, Any]:
    """Return one model; the name in the path is only compared."""
    state.check_model(scope["path_params"]["model"])
    return model_card(state)


async def tokenize(state: ServerState, scope: Scope, receive: Receive) -> dict[str, Any]:
    """Return the token ids of text or messages."""
    fields = convert_body(await read_json(scope, receive, state.max_body_bytes), TokenizeBody)
    state.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ClientError("give either prompt or messages", param="prompt")
    if fields.messages is not None:
        check_template_use(fields)
        token_ids = await state.engine.encode(
            fields.messages,
            tools=ToolOptions(tools=read_tools(fields.tools)).for_template(),
            continue_final_message=fields.continue_final_message,
            template_kwargs=fields.chat_template_kwargs,
        )
    else:
        token_ids = await state.engine.encode(fields.prompt or "", add_special_tokens=fields.add_special_tokens)
    answer: dict[str, Any] = {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": state.engine.limits.max_model_len,
    }
    if fields.return_token_strs:
        names = TokenNames(state.engine.tokenizer, hides_special=False)
        answer["token_strs"] = await asyncio.to_thread(lambda: [names.name(token_id) for token_id in token_ids])
    return answer


async def detokenize(state: ServerState, scope: Scope, receive: Receive) -> dict[str, Any]:
    """Return the text of token ids."""
    fields = convert_body(await read_json(scope, receive, state.max_body_bytes), DetokenizeBody)
    state.check_model(fields.model)
    if not fields.tokens:
        return {"prompt": ""}
    if len(fields.tokens) > state.engine.limits.max_model_len:
        raise ClientError("there are more tokens than the model's context holds", param="tokens")
    with blaming("tokens"):
        parse_prompts(fields.tokens, 1, state.engine.limits.vocab_size)
    text = await asyncio.to_thread(state.engine.tokenizer.decode, fields.tokens, fields.skip_special_tokens)
    return {"prompt": text}
