"""The shapes of answers of chat and completions, whole and event by event; see ``answer_types.py``."""

from typing import Literal

from msgspec import UNSET, UnsetType

from aserve.server.answer_types import Answer

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(Answer):
    """How much of a prompt was found in the prefix cache."""

    cached_tokens: int


class CompletionDetails(Answer):
    """How much of an output was reasoning."""

    reasoning_tokens: int


class CompletionUsage(Answer):
    """Token counts of all choices; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Alternative(Answer):
    """A token, its log probability and its bytes, None for a control token that is not shown."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(Alternative):
    """The token that was chosen, and the most likely ones."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Answer):
    """One entry for each output token."""

    content: list[ChosenToken]
    refusal: None


class CalledFunction(Answer):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """One call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET


class ChatChoice(Answer):
    """One of the ``n`` answers; ``stop_reason`` is the stop string or token id that matched."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions without ``stream``; ``created`` in Unix seconds."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class FunctionDelta(Answer):
    """More of a call: first the name, then pieces of the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Answer):
    """More of the call with this index; the first piece has its id."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Answer):
    """What is new in a choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Answer):
    """What is new in one of the ``n`` answers; the last chunk has ``stop_reason``."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatCompletionChunk(Answer):
    """One event of a streamed chat; ``usage`` only if asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


class LegacyLogprobs(Answer):
    """Lists of one length, an entry for each token; the first token of an echoed prompt has None."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One answer, numbered by prompt, then by ``n``; ``stop_reason`` is the stop string or token id that matched."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class CompletionChunkChoice(Answer):
    """What is new in one answer; the last chunk has ``stop_reason``."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET


class CompletionChunk(Answer):
    """One event of a streamed completion; ``usage`` only if asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


class Completion(Answer):
    """The answer of /v1/completions without ``stream``; ``created`` in Unix seconds."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
