"""Items of a conversation, as responses keep them.

They are stored as JSON with their type, so a continuation after a restart reads what was written before it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from aserve.server.long_text import LONG, PIECE, dump_text, load_text


class MessageItem(msgspec.Struct, frozen=True, tag="message"):
    """What somebody said."""

    role: str
    text: str


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning"):
    """What the model thought before it said or called something."""

    text: str


class FunctionCallItem(msgspec.Struct, frozen=True, tag="function_call"):
    """A function that the model wants called; ``arguments`` is JSON text."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionOutputItem(msgspec.Struct, frozen=True, tag="function_call_output"):
    """What a called function answered."""

    call_id: str
    output: str


class CustomCallItem(msgspec.Struct, frozen=True, tag="custom_tool_call"):
    """A tool that the model wants called with free text."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CustomOutputItem(msgspec.Struct, frozen=True, tag="custom_tool_call_output"):
    """What such a tool answered."""

    call_id: str
    output: str


class BuiltInCallItem(msgspec.Struct, frozen=True, tag="built_in_call"):
    """A call of a tool that the protocol has a type of its own for, as the client sent it."""

    call_id: str
    wire: dict[str, Any]


class BuiltInOutputItem(msgspec.Struct, frozen=True, tag="built_in_output"):
    """What such a tool answered, as the client sent it."""

    call_id: str
    wire: dict[str, Any]


Item = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | FunctionOutputItem
    | CustomCallItem
    | CustomOutputItem
    | BuiltInCallItem
    | BuiltInOutputItem
)

BUILT_IN_CALLS = {  # type -> the field that says what is wanted
    "apply_patch_call": "operation",
    "local_shell_call": "action",
    "shell_call": "action",
    "tool_search_call": "arguments",
}
BUILT_IN_OUTPUTS = {  # type -> the field that says what came of it
    "apply_patch_call_output": "output",
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "tool_search_output": "tools",
}

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Item).decode
_split_item = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
split_list = msgspec.json.Decoder(list[msgspec.Raw]).decode  # into the JSON of each element, at the speed of a scan


def encode_items(items: Sequence[Item]) -> bytes:
    """Return ``items`` as JSON. In a thread it leaves the GIL to others between two items, and within a long text."""
    return b"[%b]" % b",".join([_encode_item(item) for item in items])


def decode_items(encoded: bytes) -> list[Item]:
    """Return what ``encode_items`` was given; leaves the GIL to others as that does."""
    return [decode_item(item) for item in split_list(encoded)]


def decode_item(encoded: bytes | msgspec.Raw) -> Item:
    """Return the item that is ``encoded``."""
    if len(encoded) <= PIECE:
        return _decode(encoded)
    fields = _split_item(encoded)
    long = {name: bytes(value) for name, value in fields.items() if len(value) > LONG}
    texts = {name: value for name, value in long.items() if value.startswith(b'"')}
    short = _decode(msgspec.json.encode({**fields, **dict.fromkeys(texts, "")}))
    return msgspec.structs.replace(short, **{name: load_text(text) for name, text in texts.items()})


def _encode_item(item: Item) -> bytes:
    values = {name: getattr(item, name) for name in item.__struct_fields__}
    long = {name: value for name, value in values.items() if isinstance(value, str) and len(value) > PIECE}
    if not long:
        return _encode(item)
    encoded = {name: msgspec.Raw(dump_text(value)) for name, value in long.items()}
    return _encode(msgspec.structs.replace(item, **encoded))
