"""``response.create`` as it arrives, checked and turned into a ``ResponseRequest``; no I/O, no engine.

Three lists: what has an effect, what is accepted without one, and what is refused by name. ``null`` means absent.
Fields that are in no list are ignored, as the protocol asks. How tokens are chosen is read as for the other endpoints,
and what those refuse by name is refused here too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from aserve.errors import ClientError, quoted
from aserve.request import SamplingParams
from aserve.server import schema
from aserve.server.errors import type_error
from aserve.server.reasoning import reasoning_variables
from aserve.server.responses.input import read_input, unsupported
from aserve.server.responses.items import Item
from aserve.server.responses.tools import ResponseTools, read_tools
from aserve.server.schema import (
    CommonBody,
    check_template_kwargs,
    convert_body,
    is_one_of,
    log_unknown,
    sampling_params,
)
from aserve.server.structured_request import GRAMMAR_FIELDS, grammar_from

MAX_METADATA = 16
TEXT_FORMAT = "text.format"
LOGPROBS_INCLUDE = "message.output_text.logprobs"
REASONING_INCLUDE = "reasoning.encrypted_content"

WITH_EFFECT = frozenset({
    "background", "chat_template_kwargs", "generate", "include", "input", "instructions", "max_output_tokens",
    "metadata", "model", "parallel_tool_calls", "previous_response_id", "prompt_cache_options", "reasoning",
    "resumable", "store", "stream", "stream_id", "text", "tool_choice", "tools", "top_logprobs", "truncation", "type",
    "user",
})  # fmt: skip
SAMPLING_FIELDS = (  # of ``CommonBody``, with the same meaning
    "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "logit_bias", "min_p", "min_tokens",
    "presence_penalty", "priority", "repetition_penalty", "seed", "skip_special_tokens", "stop", "stop_token_ids",
    "temperature", "top_k", "top_p",
)  # fmt: skip

# Describe features that add nothing to a text model's answer, or hints that a single server has no use for.
ACCEPTED_WITHOUT_EFFECT = schema.ACCEPTED_WITHOUT_EFFECT - WITH_EFFECT - {"moderation"} | {
    "access_programs", "background_options", "client_metadata", "image", "max_tool_calls", "stream_options",
}  # fmt: skip

# Would change the answer, so they are never ignored.
REFUSED = schema.REFUSED | {"conversation", "moderation", "prompt", "thinking_token_budget"}
HARMLESS: dict[str, tuple[Any, ...]] = {  # field -> the values that ask for nothing
    **{name: values for name, values in schema.HARMLESS.items() if name not in WITH_EFFECT},
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "context_management": ([],),
    "continue_final_message": (False,),
    "echo": (False,),
    "n": (1,),
    "response_format": ({"type": "text"},),
}
RENAMED = {  # names of the other endpoints -> what to use here
    "logprobs": f"include: [{LOGPROBS_INCLUDE!r}]",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
}

INCLUDABLE = frozenset({
    LOGPROBS_INCLUDE, "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", REASONING_INCLUDE,
    "web_search_call.action.sources", "web_search_call.results",
})  # fmt: skip
SUMMARIES = ("auto", "concise", "detailed")

FIELD_TYPES: dict[str, type] = {  # of those that are not checked elsewhere
    "background": bool, "chat_template_kwargs": dict, "generate": bool, "include": list, "instructions": str,
    "max_output_tokens": int, "metadata": dict, "model": str, "parallel_tool_calls": bool, "previous_response_id": str,
    "prompt_cache_options": dict, "reasoning": dict, "resumable": bool, "store": bool, "stream": bool, "text": dict,
    "top_logprobs": int, "user": str,
}  # fmt: skip
RESUME_TYPES: dict[str, type] = {"response_id": str, "starting_after": int}
VERBOSITIES = ("low", "medium", "high")

FORMAT_FIELDS = GRAMMAR_FIELDS - {"response_format"} | {"text"}
KNOWN = WITH_EFFECT.union(SAMPLING_FIELDS, GRAMMAR_FIELDS, ACCEPTED_WITHOUT_EFFECT, REFUSED, HARMLESS, RENAMED)
PARAM_NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """One checked ``response.create``. ``items`` are its new input, without the instructions.

    ``is_kept`` (``store``) lets others than its connection find the response; ``is_resumable`` lets it outlive a lost
    client for a while, ``background`` until its end.
    """

    items: list[Item]
    params: SamplingParams
    priority: int
    instructions: str | None
    previous_response_id: str | None
    model: str | None
    metadata: dict[str, str]
    generate: bool
    tools: ResponseTools
    reasoning: Mapping[str, Any]  # effort and summary, as they came
    wants_packed_reasoning: bool
    user: str | None
    template_kwargs: dict[str, Any]
    formats: Mapping[str, Any]  # the fields that ask for structured output, as they came
    shown_text: bytes  # ``text`` as the response repeats it, in JSON
    is_streamed: bool
    is_kept: bool
    is_resumable: bool
    background: bool

    @property
    def engine_params(self) -> SamplingParams:
        """How tokens are chosen: a warm-up wants none, though ``params`` are those of the turns that follow it."""
        return self.params if self.generate else replace(self.params, max_tokens=0, min_tokens=0)

    @property
    def outlives_client(self) -> bool:
        """True if its events go into a log, from which its client reads."""
        return self.is_resumable or self.background


def parse_create(payload: Mapping[str, Any], vocab_size: int) -> ResponseRequest:
    """Check the fields of one ``response.create``; raise ClientError that names the first one at fault."""
    fields = {name: value for name, value in payload.items() if value is not None}
    log_unknown(fields, KNOWN)
    _refuse_unsupported(fields)
    reasoning = _read_reasoning(fields)
    template_kwargs = _read(fields, "chat_template_kwargs") or {}
    check_template_kwargs(template_kwargs)
    params, priority = _read_sampling(fields, vocab_size)
    request = ResponseRequest(
        items=read_input(fields.get("input")),
        params=params,
        priority=priority,
        instructions=_read(fields, "instructions"),
        previous_response_id=_read(fields, "previous_response_id"),
        model=_read(fields, "model"),
        metadata=_read_metadata(fields),
        generate=_read_generate(fields),
        tools=read_tools(
            fields.get("tools"),
            fields.get("tool_choice"),
            is_parallel=_read(fields, "parallel_tool_calls") is not False,
        ),
        reasoning=reasoning,
        wants_packed_reasoning=REASONING_INCLUDE in fields.get("include", ()),
        user=_read(fields, "user"),
        template_kwargs={**reasoning_variables(reasoning["effort"], "reasoning.effort"), **template_kwargs},
        formats={name: fields[name] for name in FORMAT_FIELDS & fields.keys()},
        shown_text=_show_text(fields),
        is_streamed=_read(fields, "stream") or False,
        is_kept=_read(fields, "store") is not False,
        is_resumable=_read(fields, "resumable") or False,
        background=_read(fields, "background") or False,
    )
    if request.background and not request.is_kept:
        raise ClientError("a background response has to be stored", param="store")
    if not request.items and request.previous_response_id is None and request.instructions is None:
        raise ClientError("input is required", param="input", code="missing_required_parameter")
    return request


def read_resume(payload: Mapping[str, Any]) -> tuple[str, int]:
    """Return the response that a ``response.resume`` names, and the number of the first event that is wanted."""
    response_id = _read(payload, "response_id", RESUME_TYPES)
    if response_id is None:
        raise ClientError("response_id is required", param="response_id", code="missing_required_parameter")
    after = _read(payload, "starting_after", RESUME_TYPES)
    if after is not None and after < 0:
        raise ClientError("starting_after must not be negative", param="starting_after")
    return response_id, 0 if after is None else after + 1


def _read(fields: Mapping[str, Any], name: str, types: Mapping[str, type] = FIELD_TYPES) -> Any:
    """Return the field, None if absent; raise ClientError if it is not of its type. Booleans never pass as numbers."""
    value, kind = fields.get(name), types[name]
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise type_error(name, kind.__name__, value)
    return value


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name in sorted(fields.keys() & (REFUSED | HARMLESS.keys())):
        if name in REFUSED or not is_one_of(fields[name], HARMLESS[name]):
            raise unsupported(name, name)
    for name in RENAMED.keys() & fields.keys():
        if fields[name] is not False:  # logprobs
            raise ClientError(
                f"{name} is not a field here; use {RENAMED[name]}", param=name, code="unsupported_parameter"
            )
    if fields.get("truncation", "disabled") != "disabled":
        raise unsupported("truncation", "truncation other than 'disabled'")
    include = _read(fields, "include") or []
    for entry in include:
        if not isinstance(entry, str) or entry not in INCLUDABLE:
            raise ClientError(f"include does not know {quoted(entry)}", param="include")


def _read_generate(fields: Mapping[str, Any]) -> bool:
    cache_options = _read(fields, "prompt_cache_options") or {}
    return _read(fields, "generate") is not False and cache_options.get("prewarm") is not True


def _read_sampling(fields: Mapping[str, Any], vocab_size: int) -> tuple[SamplingParams, int]:
    """Return how tokens are chosen, and the priority."""
    common = convert_body({name: fields[name] for name in SAMPLING_FIELDS if name in fields}, CommonBody)
    max_tokens = _read(fields, "max_output_tokens")
    if max_tokens is not None and max_tokens < 1:
        raise ClientError("max_output_tokens must be at least 1", param="max_output_tokens")
    top_logprobs = _read(fields, "top_logprobs") or 0
    logprobs = top_logprobs if LOGPROBS_INCLUDE in (fields.get("include") or ()) else None
    grammar = grammar_from(fields, TEXT_FORMAT)
    try:
        params = sampling_params(common, vocab_size, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar)
        return params, common.priority
    except ClientError as error:
        name = PARAM_NAMES.get(error.param or "", error.param)
        raise ClientError(error.message.replace(error.param or "", name or "", 1), param=name) from error


def _read_reasoning(fields: Mapping[str, Any]) -> dict[str, Any]:
    options = _read(fields, "reasoning") or {}
    summary = options.get("summary") or options.get("generate_summary")
    if summary is not None and summary not in SUMMARIES:
        raise ClientError(f"reasoning.summary must be one of {', '.join(SUMMARIES)}", param="reasoning.summary")
    return {"effort": options.get("effort"), "summary": summary}


def _show_text(fields: Mapping[str, Any]) -> bytes:
    """Return what the response repeats of ``text``, encoded once: within the response it may be nested too deeply."""
    options = _read(fields, "text") or {}
    verbosity = options.get("verbosity")
    if verbosity is not None and verbosity not in VERBOSITIES:
        raise ClientError(f"text.verbosity must be one of {', '.join(VERBOSITIES)}", param="text.verbosity")
    shown = {"format": options.get("format") or {"type": "text"}}
    try:
        return orjson.dumps(shown if verbosity is None else {**shown, "verbosity": verbosity})
    except TypeError:
        raise ClientError("text.format is nested too deeply", param=TEXT_FORMAT) from None


def _read_metadata(fields: Mapping[str, Any]) -> dict[str, str]:
    metadata = _read(fields, "metadata") or {}
    if len(metadata) > MAX_METADATA or not all(isinstance(value, str) for value in metadata.values()):
        raise ClientError(f"metadata must hold at most {MAX_METADATA} strings", param="metadata")
    if any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise ClientError("a metadata key has at most 64 characters, a value 512", param="metadata")
    return dict(metadata)
