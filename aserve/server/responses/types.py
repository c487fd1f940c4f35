"""The shapes of answers of the Responses API; see ``answer_types.py``."""

from typing import Any, Literal

from aserve.server.answer_types import Answer, Typed


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
