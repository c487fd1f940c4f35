"""Which HTTP operations there are, and what each takes and answers: the rows of the OpenAPI document."""

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from aserve.server import answer_types as answers
from aserve.server.completions import completion_types as completions
from aserve.server.messages import types as messages
from aserve.server.messages.schema import MessagesBody, PromptBody
from aserve.server.models import DetokenizeBody, TokenizeBody
from aserve.server.responses import types as responses
from aserve.server.responses.query import MAX_PAGE, MAX_SEQUENCE_NUMBER, ORDERS, SWITCHES
from aserve.server.schema import ChatBody, CompletionBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. ``answer`` None means text; ``query`` has the JSON schemas of its parameters."""

    summary: str
    answer: type[Struct] | None
    body: type[Struct] | str | None = None  # a string names one that is read field by field
    event: type[Struct] | None = None  # of a stream, if the body or the query asks for one
    ends_with_done: bool = False  # whether [DONE] is the last event of the stream
    is_open: bool = False  # answered without a key
    query: tuple[tuple[str, dict[str, Any]], ...] = ()
    error: type[Struct] = answers.ErrorAnswer
    failure: type[Struct] | None = None  # the answer with status 503 where it is no error
    example: dict[str, Any] | None = None  # of a body
    opens: str | None = None  # the path at which the ``id`` of the answer can be used


MESSAGES = [{"role": "user", "content": "Name three rivers."}]
CREATE_RESPONSE = "CreateResponse"
RESPONSE = "/v1/responses/{response_id}"
RESPONSE_QUERY = (
    ("stream", {"enum": list(SWITCHES)}),
    ("starting_after", {"type": "integer", "minimum": 0, "maximum": MAX_SEQUENCE_NUMBER}),
)
ITEMS_QUERY = (
    ("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
    ("after", {"type": "string"}),
    ("order", {"enum": list(ORDERS)}),
)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/health"): Operation(
        summary="Whether the process is alive", is_open=True, answer=answers.StatusAnswer, failure=answers.StatusAnswer
    ),
    ("GET", "/ready"): Operation(summary="Whether requests are served", is_open=True, answer=answers.StatusAnswer),
    ("GET", "/version"): Operation(summary="The version of aserve", answer=answers.VersionAnswer),
    ("GET", "/metrics"): Operation(summary="Prometheus metrics", answer=None),
    ("GET", "/v1/models"): Operation(summary="List the served models", answer=answers.ModelList),
    ("GET", "/v1/models/{model}"): Operation(summary="Describe a served model", answer=answers.Model),
    ("POST", "/tokenize"): Operation(
        summary="Turn text or messages into token ids",
        body=TokenizeBody,
        example={"prompt": "Name three rivers."},
        answer=answers.Tokens,
    ),
    ("POST", "/detokenize"): Operation(
        summary="Turn token ids into text",
        body=DetokenizeBody,
        example={"tokens": [1, 2, 3]},
        answer=answers.DetokenizedText,
    ),
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answer a chat",
        body=ChatBody,
        example={"messages": MESSAGES, "max_tokens": 8},
        answer=completions.ChatCompletion,
        event=completions.ChatCompletionChunk,
        ends_with_done=True,
    ),
    ("POST", "/v1/completions"): Operation(
        summary="Continue prompts",
        body=CompletionBody,
        example={"prompt": "Rivers are", "max_tokens": 8},
        answer=completions.Completion,
        event=completions.CompletionChunk,
        ends_with_done=True,
    ),
    ("POST", "/v1/messages"): Operation(
        summary="Answer a chat in Anthropic's protocol",
        body=MessagesBody,
        example={"messages": MESSAGES, "max_tokens": 8},
        answer=messages.Message,
        event=answers.Typed,
        error=messages.MessagesErrorAnswer,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="Count the tokens of a chat in Anthropic's protocol",
        body=PromptBody,
        example={"messages": MESSAGES},
        answer=messages.MessageTokens,
        error=messages.MessagesErrorAnswer,
    ),
    ("POST", "/v1/responses"): Operation(
        summary="Make a response",
        body=CREATE_RESPONSE,
        opens=RESPONSE,
        example={"input": "Name three rivers.", "max_output_tokens": 8},
        answer=responses.Response,
        event=answers.Typed,
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        summary="Count the tokens of a response's input",
        body=CREATE_RESPONSE,
        example={"input": "Name three rivers."},
        answer=responses.InputTokens,
    ),
    ("POST", "/v1/responses/compact"): Operation(summary="Not supported: refused", answer=answers.ErrorAnswer),
    ("GET", RESPONSE): Operation(
        summary="Read a response, or go on with its stream",
        answer=responses.Response,
        event=answers.Typed,
        query=RESPONSE_QUERY,
    ),
    ("DELETE", RESPONSE): Operation(summary="Delete a response", answer=responses.DeletedResponse),
    ("POST", f"{RESPONSE}/cancel"): Operation(summary="Cancel a background response", answer=responses.Response),
    ("GET", f"{RESPONSE}/input_items"): Operation(
        summary="List what a response answered", answer=responses.ItemList, query=ITEMS_QUERY
    ),
}
