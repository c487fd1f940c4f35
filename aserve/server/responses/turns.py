"""Items of a conversation as the chat messages that a template can render."""

from collections.abc import Iterable
from typing import Any

import orjson

from aserve.server.responses.items import (
    BUILT_IN_CALLS,
    BUILT_IN_OUTPUTS,
    BuiltInCallItem,
    BuiltInOutputItem,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)

CUSTOM_INPUT = "input"  # to a template, a tool that takes free text is a function with this one argument

Output = FunctionOutputItem | CustomOutputItem | BuiltInOutputItem
Call = FunctionCallItem | CustomCallItem | BuiltInCallItem


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
        elif isinstance(item, Output):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _output_text(item)})
            own = None
        else:
            if own is None or isinstance(item, ReasoningItem):
                own = {"role": "assistant", "content": ""}
                messages.append(own)
            _add_to_turn(own, item)
    return messages


def function_name(name: str, namespace: str | None) -> str:
    """Return the name by which a model knows the tool ``name`` of ``namespace``."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("_") else f"{namespace}__{name}"


def _add_to_turn(message: dict[str, Any], item: MessageItem | ReasoningItem | Call) -> None:
    if isinstance(item, MessageItem):
        message["content"] = item.text
    elif isinstance(item, ReasoningItem):
        message["reasoning_content"] = item.text
    else:
        call = {"id": item.call_id, "type": "function", "function": _function_of(item)}
        message.setdefault("tool_calls", []).append(call)


def _function_of(item: Call) -> dict[str, str]:
    if isinstance(item, FunctionCallItem):
        return {"name": function_name(item.name, item.namespace), "arguments": item.arguments}
    if isinstance(item, CustomCallItem):
        return {"name": function_name(item.name, item.namespace), "arguments": _json({CUSTOM_INPUT: item.input})}
    kind = item.wire["type"]
    return {"name": kind.removesuffix("_call"), "arguments": _text(item.wire[BUILT_IN_CALLS[kind]])}


def _output_text(item: Output) -> str:
    if isinstance(item, BuiltInOutputItem):
        return _text(item.wire[BUILT_IN_OUTPUTS[item.wire["type"]]])
    return item.output


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
