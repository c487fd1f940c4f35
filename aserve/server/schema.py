"""The fields of /v1/chat/completions and /v1/completions, checked and turned into what the engine takes; no I/O.

``null`` means absent. Fields stand in one of three lists: those with an effect are attributes of the bodies below
(those that ask for structured output are read in ``structured_request.py``);
those in ACCEPTED_WITHOUT_EFFECT change nothing for a text model on one server; those in HARMLESS and REFUSED would
change the answer, so their use is refused by name. Fields in no list are ignored, with one line in the log.
"""

import logging
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import orjson
from msgspec import Meta

from aserve.errors import ClientError
from aserve.request import MAX_INT32, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams
from aserve.server.structured_request import GRAMMAR_FIELDS, grammar_from
from aserve.tokenizer.messages import message_schema

logger = logging.getLogger(__name__)

MAX_CHOICES = 128  # of one prompt
MAX_ANSWERS = 1024  # prompts x choices
MAX_STOP_TOKEN_IDS = 128
MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_BYTES = 1 << 16  # as JSON
DEFAULT_COMPLETION_TOKENS = 16
SEED_PERIOD = 2**64
TOKEN_ID = re.compile(r"[0-9]{1,9}", re.ASCII)
MAX_LOGGED_FIELDS = 20
MAX_LOGGED_CHARS = 64  # of a field's name

ACCEPTED_WITHOUT_EFFECT = frozenset({
    "metadata", "moderation", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
})  # fmt: skip

HARMLESS: dict[str, tuple[Any, ...]] = {  # field -> the values that ask for nothing
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "use_beam_search": (False,),
}
REFUSED = frozenset({
    "audio", "bad_words", "chat_template", "documents", "grammar", "guided_whitespace_pattern", "logits_processors",
    "prompt_logprobs", "structural_tag", "truncate_prompt_tokens", "web_search_options",
})  # fmt: skip


Messages = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
ChatMessage = Annotated[dict[str, Any], Meta(extra_json_schema=message_schema())]
ChatMessages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
Text = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Prompts = Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream reports besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CommonBody(msgspec.Struct, kw_only=True):
    """Fields of both endpoints. Ranges that SamplingParams checks are not repeated here."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)] = msgspec.field(default_factory=dict)
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] = msgspec.field(default_factory=list)
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0


SAME_NAME = (
    "min_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip


class ChatBody(CommonBody, kw_only=True):
    """Body of a chat completion; messages are for the template to check, tools are checked in ``chat_tools.py``."""

    messages: ChatMessages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] = msgspec.field(default_factory=dict)
    thinking_token_budget: Annotated[int, Meta(ge=1)] | None = None  # vLLM's name
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionBody(CommonBody, kw_only=True):
    """Body of a text completion; which forms of ``prompt`` go together is checked in ``prompts.py``."""

    prompt: Prompts
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What is asked for, whatever the endpoint."""

    params: SamplingParams
    model: str | None
    n: int
    priority: int
    is_streamed: bool
    include_usage: bool
    continuous_usage: bool

    def params_of(self, choice: int) -> SamplingParams:
        """Return the parameters of one of the ``n`` choices: seeds count up, so that choices differ."""
        if choice == 0 or self.params.seed is None:
            return self.params
        seed = self.params.seed + choice
        return replace(self.params, seed=seed if seed < SEED_PERIOD else seed - SEED_PERIOD)


def parse_chat(body: Mapping[str, Any], vocab_size: int) -> tuple[ChatBody, AnswerOptions]:
    """Return the fields, their messages unchecked, and the options; raise ClientError that names the field at fault."""
    fields = convert_body(body, ChatBody)
    check_template_use(fields)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise ClientError("top_logprobs needs logprobs to be true", param="top_logprobs")
    max_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    if max_tokens is not None and not 1 <= max_tokens <= MAX_INT32:
        name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
        raise ClientError(f"{name} must be between 1 and {MAX_INT32}, got {max_tokens}", param=name)
    params = sampling_params(
        fields,
        vocab_size,
        max_tokens=max_tokens,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        grammar=grammar_from(body),
    )
    return fields, _options(fields, params)


class TemplateFields(Protocol):
    """The fields of a body that say how its messages are rendered."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]


def check_template_use(fields: TemplateFields) -> None:
    """Raise ClientError that names the field at fault."""
    if not fields.add_generation_prompt and not fields.continue_final_message:
        raise ClientError(
            "add_generation_prompt can be false only with continue_final_message",
            param="add_generation_prompt",
            code="unsupported_parameter",
        )
    check_template_kwargs(fields.chat_template_kwargs)


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise ClientError for more than a template has use for."""
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise ClientError(
            f"chat_template_kwargs has more than {MAX_TEMPLATE_KWARGS} entries", param="chat_template_kwargs"
        )
    try:
        num_bytes = len(orjson.dumps(kwargs))
    except TypeError:
        raise ClientError("chat_template_kwargs is nested too deeply", param="chat_template_kwargs") from None
    if num_bytes > MAX_TEMPLATE_KWARGS_BYTES:
        raise ClientError(
            f"chat_template_kwargs has {num_bytes} bytes of JSON, more than {MAX_TEMPLATE_KWARGS_BYTES}",
            param="chat_template_kwargs",
        )


def parse_completion(body: Mapping[str, Any], vocab_size: int) -> tuple[CompletionBody, AnswerOptions]:
    """Return the fields and the options; raise ClientError that names the field at fault."""
    fields = convert_body(body, CompletionBody)
    if fields.best_of is not None and fields.best_of != fields.n:
        raise ClientError("best_of other than n is not supported", param="best_of", code="unsupported_parameter")
    params = sampling_params(
        fields,
        vocab_size,
        max_tokens=DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.logprobs if fields.echo else None,
        grammar=grammar_from(body),
    )
    return fields, _options(fields, params)


Body = TypeVar("Body", bound=msgspec.Struct)


def convert_body(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """Return ``body`` as ``kind``; nulls count as absent."""
    fields = {name: value for name, value in body.items() if value is not None}
    _refuse_unsupported({name: value for name, value in fields.items() if name not in kind.__struct_fields__})
    log_unknown(fields, GRAMMAR_FIELDS.union(kind.__struct_fields__, ACCEPTED_WITHOUT_EFFECT, HARMLESS))
    if isinstance(options := fields.get("stream_options"), dict):
        fields["stream_options"] = {name: value for name, value in options.items() if value is not None}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _client_error(error) from None


def log_unknown(fields: Mapping[str, Any], known: Set[str]) -> None:
    """Say in one line which fields are ignored because nobody knows them."""
    if unknown := [name[:MAX_LOGGED_CHARS] for name in fields if name not in known]:
        logger.info("ignoring unknown fields: %s", unknown[:MAX_LOGGED_FIELDS])


def _client_error(error: msgspec.ValidationError) -> ClientError:
    message = str(error)
    found = re.search(r"\$\.(\w+)", message) or re.search(r"required field `(\w+)`", message)
    return ClientError(message, param=found.group(1) if found else None)


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, values in HARMLESS.items():
        if name in fields and not is_one_of(fields[name], values):
            raise ClientError(f"{name} is not supported", param=name, code="unsupported_parameter")
    if refused := sorted(REFUSED & fields.keys()):
        raise ClientError(f"{refused[0]} is not supported", param=refused[0], code="unsupported_parameter")


def is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether ``value`` is one of ``values`` and of its type: in JSON, 1 is not true."""
    return any(type(value) is type(one) and value == one for one in values)


def sampling_params(fields: CommonBody, vocab_size: int, **others: Any) -> SamplingParams:
    """Return the parameters of ``fields``; ``others`` are those whose names differ between endpoints."""
    params = SamplingParams(
        top_k=min(fields.top_k, vocab_size),
        logit_bias=_logit_bias(fields.logit_bias),
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        **{name: getattr(fields, name) for name in SAME_NAME},
        **others,
    )
    params.check_vocabulary(vocab_size)
    return params


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    if not all(TOKEN_ID.fullmatch(token_id) for token_id in bias):
        raise ClientError("logit_bias must map token ids to numbers", param="logit_bias")
    return {int(token_id): value for token_id, value in bias.items()}


def _options(fields: CommonBody, params: SamplingParams) -> AnswerOptions:
    return AnswerOptions(
        params=params,
        model=fields.model,
        n=fields.n,
        priority=fields.priority,
        is_streamed=fields.stream,
        include_usage=fields.stream_options.include_usage,
        continuous_usage=fields.stream_options.continuous_usage_stats,
    )
