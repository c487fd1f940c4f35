"""Items of a conversation as the API lists them."""

from typing import Any

from aserve.server.responses.item_ids import ItemPlace
from aserve.server.responses.items import (
    BuiltInCallItem,
    BuiltInOutputItem,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
)


def wire_item(item: Item, place: ItemPlace) -> dict[str, Any]:
    """Return ``item`` as it is listed at ``place``."""
    if isinstance(item, MessageItem):
        if item.role == "assistant":
            part = {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}
        else:
            part = {"type": "input_text", "text": item.text}
        return _completed(place.item_id("msg"), "message", role=item.role, content=[part])
    if isinstance(item, FunctionCallItem):
        call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        return _completed(place.item_id("fc"), "function_call", **call, **_namespace(item))
    if isinstance(item, FunctionOutputItem):
        return _completed(place.item_id("fco"), "function_call_output", call_id=item.call_id, output=item.output)
    if isinstance(item, CustomCallItem):
        call = {"call_id": item.call_id, "name": item.name, "input": item.input}
        return _completed(place.item_id("ctc"), "custom_tool_call", **call, **_namespace(item))
    if isinstance(item, CustomOutputItem):
        return _completed(place.item_id("ctco"), "custom_tool_call_output", call_id=item.call_id, output=item.output)
    if isinstance(item, BuiltInCallItem | BuiltInOutputItem):
        return {"status": "completed", **item.wire, "id": item.wire.get("id") or place.item_id("item")}
    content = [{"type": "reasoning_text", "text": item.text}]
    return _completed(place.item_id("rs"), "reasoning", summary=[], content=content)


def _completed(item_id: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": item_id, "type": kind, "status": "completed", **fields}


def _namespace(item: FunctionCallItem | CustomCallItem) -> dict[str, str]:
    return {} if item.namespace is None else {"namespace": item.namespace}
