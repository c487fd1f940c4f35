"""The fields of /v1/messages and /v1/messages/count_tokens, checked and turned into what the engine takes; no I/O.

Fields of the other endpoints that choose how tokens are sampled mean the same here, and what those refuse by name is
refused too. ``null`` means absent; fields in no list are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aserve.errors import ClientError
from aserve.request import MAX_STOP_STRINGS, SamplingParams
from aserve.server.messages.input import read_conversation
from aserve.server.messages.tools import read_tool_options
from aserve.server.reasoning import reasoning_variables
from aserve.server.schema import CommonBody, Messages, check_template_kwargs, convert_body, sampling_params
from aserve.server.structured_request import grammar_from
from aserve.server.tools import ToolOptions

OUTPUT_FORMAT = "output_config.format"
OLD_OUTPUT_FORMAT = "output_format"  # its name while it was new, which gateways still use

# Say how a hosted service bills, routes, caches or shortens; one server with one model has no use for them.
ACCEPTED_WITHOUT_EFFECT = frozenset({
    "billing_policy", "cache_control", "context_management", "diagnostics", "fallback_credit_token",
    "fallbacks", "inference_geo", "service_tier", "speed", "user_profile_id", "workspace_id",
})  # fmt: skip
REFUSED = {  # what would have to be done, or be here -> the code by which clients know that it is not
    "compaction": "unsupported_parameter",
    "container": "unsupported_parameter",
    "mcp_servers": "unsupported_parameter",
    "thread": "thread_unsupported_request",  # on which they send the whole conversation instead
}
RENAMED = {  # names of the other endpoints -> what to use here
    "max_completion_tokens": "max_tokens",
    "response_format": OUTPUT_FORMAT,
    "stop": "stop_sequences",
}
THINKS = {"enabled": True, "adaptive": True, "disabled": False}  # whether the template is told to, where it can be


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """Whether to think first, as far as the template lets a request choose, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class PromptBody(CommonBody, kw_only=True):
    """What the prompt is made of; messages are checked in ``messages_input.py``, tools in ``messages_tools.py``."""

    messages: Messages
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] = msgspec.field(default_factory=list)
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    output_config: dict[str, Any] = msgspec.field(default_factory=dict)
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class MessagesBody(PromptBody, kw_only=True):
    """Body of a message: it has to say how long the answer may be. 0 computes the prompt for later requests."""

    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """One checked body."""

    messages: list[dict[str, Any]]  # as the chat template takes them
    tools: ToolOptions
    params: SamplingParams
    model: str | None
    priority: int
    is_streamed: bool
    template_kwargs: dict[str, Any]
    shows_thinking: bool
    thinking_budget: int | None

    @property
    def continued(self) -> str | None:
        """The beginning of the answer, if the conversation ends with one."""
        last = self.messages[-1]
        text: str = last["content"]
        return text if last["role"] == "assistant" else None


def format_field(body: Mapping[str, Any]) -> str:
    """Return the field that asks for a form of the answer; raise ClientError if there are two."""
    if body.get(OLD_OUTPUT_FORMAT) is None:
        return OUTPUT_FORMAT
    config = body.get("output_config")
    if isinstance(config, Mapping) and config.get("format") is not None:
        raise ClientError(f"{OUTPUT_FORMAT} and {OLD_OUTPUT_FORMAT} cannot be combined", param=OLD_OUTPUT_FORMAT)
    return OLD_OUTPUT_FORMAT


def parse_message(body: Mapping[str, Any], vocab_size: int) -> MessagesRequest:
    """Check the body of a message to be made; raise ClientError that names the field at fault."""
    return _parse(body, MessagesBody, vocab_size)


def parse_count(body: Mapping[str, Any], vocab_size: int) -> MessagesRequest:
    """Check the body of a prompt whose tokens are to be counted; raise ClientError that names the field at fault."""
    return _parse(body, PromptBody, vocab_size)


def _parse(body: Mapping[str, Any], kind: type[PromptBody], vocab_size: int) -> MessagesRequest:
    fields = convert_body(_without_foreign(body), kind)
    if fields.n != 1:
        raise ClientError("n other than 1 is not supported", param="n", code="unsupported_parameter")
    messages = read_conversation(fields.messages, fields.system)
    if messages[-1].get("tool_calls"):
        raise ClientError("the last message of the conversation must not end with a tool_use block", param="messages")
    thinking = fields.thinking
    template_kwargs = {**_thinking_variables(fields), **fields.chat_template_kwargs}
    check_template_kwargs(template_kwargs)
    return MessagesRequest(
        messages=messages,
        tools=read_tool_options(fields.tools, fields.tool_choice),
        params=_sampling(fields, body, vocab_size),
        model=fields.model,
        priority=fields.priority,
        is_streamed=fields.stream,
        template_kwargs=template_kwargs,
        shows_thinking=thinking is None or thinking.display != "omitted",
        thinking_budget=None if thinking is None else thinking.budget_tokens,
    )


def _without_foreign(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that mean something here; raise ClientError for those that would have to."""
    fields = {name: value for name, value in body.items() if value is not None and name not in ACCEPTED_WITHOUT_EFFECT}
    for name in sorted(REFUSED.keys() & fields.keys()):
        if fields[name]:
            raise ClientError(f"{name} is not supported", param=name, code=REFUSED[name])
    if renamed := sorted(RENAMED.keys() & fields.keys()):
        name = renamed[0]
        raise ClientError(f"{name} is not a field here; use {RENAMED[name]}", param=name, code="unsupported_parameter")
    return fields


def _thinking_variables(fields: PromptBody) -> dict[str, Any]:
    """Return the template's variables for how hard to think and whether to; the latter is ``thinking``'s to say."""
    variables = reasoning_variables(fields.output_config.get("effort"), "output_config.effort")
    if fields.thinking is not None and fields.thinking.type in THINKS:
        thinks = THINKS[fields.thinking.type]
        variables |= {"enable_thinking": thinks, "thinking": thinks}
    return variables


def _sampling(fields: PromptBody, body: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    fields.stop = fields.stop_sequences
    grammar = grammar_from(body, format_field(body))
    try:
        return sampling_params(fields, vocab_size, max_tokens=fields.max_tokens, grammar=grammar)
    except ClientError as error:
        if error.param == "stop":
            error.param = "stop_sequences"
        raise
