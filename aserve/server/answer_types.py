"""The shapes of JSON answers, declared for the OpenAPI document; the answers themselves are built as bytes.

A field that is not always there has the default UNSET. No other fields are sent: tests hold answers to these types.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(Struct, forbid_unknown_fields=True, kw_only=True):
    """An object with these fields and no others."""


class ErrorBody(Answer):
    """What went wrong: for people, for programs, and with which field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The answer to a request that failed."""

    error: ErrorBody


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


class StatusAnswer(Answer):
    """How the server is."""

    status: Literal["ok", "failed", "stuck", "ready"]


class VersionAnswer(Answer):
    """Which aserve this is."""

    version: str


class Model(Answer):
    """A served model; ``max_model_len`` is its context in tokens, ``created`` in Unix seconds."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    """The served models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    """What a prompt becomes; ``token_strs`` only if asked for."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class DetokenizedText(Answer):
    """The text of token ids."""

    prompt: str


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
    """One of the ``n`` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions without ``stream``; ``created`` in Unix seconds."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class LegacyLogprobs(Answer):
    """Lists of one length, an entry for each token; the first token of an echoed prompt has None."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One answer, numbered by prompt, then by ``n``."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason


class Completion(Answer):
    """The answer of /v1/completions without ``stream``; ``created`` in Unix seconds."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class Typed(Struct):
    """An object of the named type; its other fields depend on it."""

    type: str


class ReportedError(Answer):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Answer):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "steered"]


class InputTokensDetails(Answer):
    """How much of the input was found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """How much of the output was reasoning."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(Answer):
    """A response, finished or not; times in Unix seconds."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: ReportedError | None
    incomplete_details: IncompleteDetails | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Typed]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Typed]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class DeletedResponse(Answer):
    """That a response is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Answer):
    """One page of the items that a response answered."""

    object: Literal["list"]
    data: list[Typed]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(Answer):
    """How long the prompt of a response would be."""

    object: Literal["response.input_tokens"]
    input_tokens: int


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
