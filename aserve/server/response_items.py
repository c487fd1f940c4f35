"""Items of a conversation, as responses keep them, and the chat messages they make for a template.

They are stored as JSON with their type, so a continuation after a restart reads what was written before it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec


class MessageItem(msgspec.Struct, frozen=True, tag="message"):
    """What somebody said."""

    role: str
    text: str


class FunctionCallItem(msgspec.Struct, frozen=True, tag="function_call"):
    """A function that the model wants called; ``arguments`` is JSON text."""

    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(msgspec.Struct, frozen=True, tag="function_call_output"):
    """What a called function answered."""

    call_id: str
    output: str


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning"):
    """What the model thought before it said or called something."""

    text: str


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem

decode_items = msgspec.json.Decoder(list[Item]).decode
encode_items = msgspec.json.Encoder().encode


def chat_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return ``items`` as the tokenizer's chat template takes them.

    Templates know one message for each turn of the model: what it thought, said and called is put together.
    """
    messages: list[dict[str, Any]] = []
    own: dict[str, Any] | None = None  # the model's turn, while it goes on
    for item in items:
        if isinstance(item, MessageItem) and (item.role != "assistant" or own is None or own["content"]):
            own = {"role": item.role, "content": item.text}
            messages.append(own)
            own = own if item.role == "assistant" else None
        elif isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            own = None
        else:
            if own is None or isinstance(item, ReasoningItem):
                own = {"role": "assistant", "content": ""}
                messages.append(own)
            _add_to_turn(own, item)
    return messages


def _add_to_turn(message: dict[str, Any], item: Item) -> None:
    if isinstance(item, MessageItem):
        message["content"] = item.text
    elif isinstance(item, ReasoningItem):
        message["reasoning_content"] = item.text
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def wire_items(items: Sequence[Item], response_id: str) -> list[dict[str, Any]]:
    """Return ``items`` as the input of ``response_id`` is listed; an item's id follows from its place."""
    return [_wire_item(item, f"{response_id.removeprefix('resp_')}_{place}") for place, item in enumerate(items)]


def _wire_item(item: Item, suffix: str) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        if item.role == "assistant":
            part = {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}
        else:
            part = {"type": "input_text", "text": item.text}
        fields = {"role": item.role, "content": [part], "status": "completed"}
        return {"id": f"msg_{suffix}", "type": "message", **fields}
    if isinstance(item, FunctionCallItem):
        fields = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        return {"id": f"fc_{suffix}", "type": "function_call", "status": "completed", **fields}
    if isinstance(item, FunctionOutputItem):
        fields = {"call_id": item.call_id, "output": item.output}
        return {"id": f"fco_{suffix}", "type": "function_call_output", "status": "completed", **fields}
    content = [{"type": "reasoning_text", "text": item.text}]
    return {"id": f"rs_{suffix}", "type": "reasoning", "summary": [], "content": content, "status": "completed"}
