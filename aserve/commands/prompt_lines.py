"""The JSON lines that ``aserve generate`` reads: each a prompt with its sampling fields, or why it is none."""

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from aserve.errors import ClientError
from aserve.request import SamplingParams
from aserve.suggestion import did_you_mean

logger = logging.getLogger(__name__)

Prompt = str | list[int] | list[dict[str, Any]]
SAMPLING_FIELDS = {setting.name for setting in dataclasses.fields(SamplingParams)}
LABELS = ("id", "custom_id")
KNOWN = SAMPLING_FIELDS.union(LABELS, ("prompt", "messages"))


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLine:
    """One line. ``labels`` are its fields that are written beside the answer; ``error`` says why it cannot run."""

    prompt: Prompt
    params: SamplingParams
    labels: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None


def read_lines(source: Iterable[bytes], defaults: SamplingParams) -> Iterator[PromptLine]:
    """Yield a PromptLine for every line that is not blank; sampling fields of a line win over ``defaults``."""
    ignored: set[str] = set()
    for number, text in enumerate(source, start=1):
        if text.strip():
            yield _read_line(f"line {number}", text, defaults, ignored)


def _read_line(name: str, text: bytes, defaults: SamplingParams, ignored: set[str]) -> PromptLine:
    labels: dict[str, Any] = {}
    try:
        fields = _parse(text)
        for unknown in sorted(fields.keys() - KNOWN - ignored):
            ignored.add(unknown)  # one warning each, not one a line
            logger.warning("%s: ignoring the unknown field %.64r%s", name, unknown, did_you_mean(unknown, KNOWN))
        labels = {key: fields[key] for key in LABELS if key in fields}
        return PromptLine(_prompt(fields), _params(fields, defaults), labels)
    except ClientError as error:
        return PromptLine("", defaults, labels, f"{name}: {error}")


def _parse(text: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ClientError("not a JSON object")
    return fields


def _prompt(fields: dict[str, Any]) -> Prompt:
    if "messages" in fields:
        messages = fields["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise ClientError(f"messages must be a list of objects, got {messages!r:.100}")
        return messages
    if "prompt" not in fields:
        raise ClientError("there is neither 'prompt' nor 'messages'")
    prompt: Prompt = fields["prompt"]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and {int}.issuperset(map(type, prompt))):
        raise ClientError(f"prompt must be a text or a list of token ids, got {prompt!r:.100}")
    return prompt


def _params(fields: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Apply the sampling fields of one line, if any, over the flags; null means absent."""
    given = {name: value for name, value in fields.items() if name in SAMPLING_FIELDS and value is not None}
    if isinstance(bias := given.get("logit_bias"), dict):
        try:
            given["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
        except ValueError as error:
            raise ClientError("logit_bias must map token ids to numbers") from error
    return dataclasses.replace(defaults, **given)
