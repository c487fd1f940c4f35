"""The shapes of answers of Anthropic's protocol; see ``answer_types.py``."""

from typing import Literal

from msgspec import UNSET, UnsetType

from aserve.server.answer_types import Answer, Typed


class ErrorDetails(Answer):
    """A machine-readable word for what went wrong."""

    error_code: str


class MessagesErrorBody(Answer):
    """What went wrong; the message names the field at fault."""

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class MessagesErrorAnswer(Answer):
    """The answer to a request that failed, as Anthropic's protocol has it."""

    type: Literal["error"]
    error: MessagesErrorBody
    request_id: str


class ThinkingDetails(Answer):
    """How much of a message was thought."""

    thinking_tokens: int


class MessagesUsage(Answer):
    """Token counts of a message; the three of the input add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails | UnsetType = UNSET


class Message(Answer):
    """The answer of /v1/messages without ``stream``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Typed]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessagesUsage


class MessageTokens(Answer):
    """How long the prompt of a message would be."""

    input_tokens: int
