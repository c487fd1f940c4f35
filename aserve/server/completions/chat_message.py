"""What was read in an answer, in the shapes of a chat completion: deltas, a whole message, why it ended; pure.

Reasoning goes by two names, ``reasoning_content`` and ``reasoning``, since clients look for one or the other.
"""

from typing import Any

from aserve.parsing.answer_reader import AnswerDelta, AnswerReader, PartEnd
from aserve.parsing.deltas import ReasoningDelta, TextDelta, ToolCallStart
from aserve.request import FinishReason
from aserve.server.sse import encode_json, encode_text

TOOL_CALLS = "tool_calls"


def render_delta(delta: AnswerDelta) -> bytes:
    """Return the JSON of ``delta``, nothing for the end of a part."""
    if isinstance(delta, TextDelta):
        return b'{"content":%b}' % encode_text(delta.text)
    if isinstance(delta, ReasoningDelta):
        text = encode_text(delta.text)
        return b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
    if isinstance(delta, PartEnd):
        return b""
    if isinstance(delta, ToolCallStart):
        call = {"index": delta.index, **_render_call(delta.id, delta.name, "")}
        return encode_json({"tool_calls": [call]})
    return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (delta.index, encode_text(delta.text))


def render_message(text: str, reader: AnswerReader | None) -> dict[str, Any]:
    """Return the message of a whole answer, which is ``text`` unless it was read."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reader is None:
        return message
    calls = [_render_call(call.id, call.name, call.arguments) for call in reader.calls]
    message["content"] = reader.text or (None if calls else "")
    if reasoning := reader.reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return message | {"tool_calls": calls} if calls else message


def finish_reason_of(reason: FinishReason, reader: AnswerReader | None) -> str:
    """Return why the answer ended; one that was cut, within a call too, never passes for one that is to be acted on."""
    if reader is not None and reason is FinishReason.STOP and reader.has_whole_calls:
        return TOOL_CALLS
    return reason


def _render_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
