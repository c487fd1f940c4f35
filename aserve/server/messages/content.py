"""The content blocks of a whole answer of /v1/messages; pure."""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from aserve.parsing.answer_reader import AnswerPart, AnswerReader, CallPart, ReasoningPart, TextPart


def render_content(text: str, reader: AnswerReader | None, *, shows_thinking: bool) -> list[dict[str, Any]]:
    """Return the blocks of an answer, which is ``text`` unless it was read."""
    parts = reader.parts if reader is not None else [TextPart(text)] if text else []
    return [_block(part, shows_thinking) for part in parts]


def signature_of(part: ReasoningPart) -> str:
    """Return what clients have to give back with a thought: a digest, for the thought itself is all that is needed."""
    return base64.b64encode(hashlib.sha256(part.text.encode()).digest()).decode()


def call_block(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block of a call."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _block(part: AnswerPart, shows_thinking: bool) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, CallPart):
        return call_block(part.id, part.name, _arguments_of(part))
    thinking = part.text if shows_thinking else ""
    return {"type": "thinking", "thinking": thinking, "signature": signature_of(part)}


def _arguments_of(call: CallPart) -> Mapping[str, Any]:
    """Return the arguments, none for a call in which the answer was cut: half of them could pass for all."""
    try:
        arguments = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
