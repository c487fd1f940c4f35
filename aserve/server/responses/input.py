"""The ``input`` of a response, as text or a list of items, checked and turned into items of a conversation."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from aserve.errors import ClientError, quoted
from aserve.server.errors import type_error
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
from aserve.server.responses.portable_reasoning import unpack_reasoning
from aserve.tokenizer.messages import ROLES, TEXT_PARTS

logger = logging.getLogger(__name__)

MAX_INPUT_ITEMS = 4096
REFERENCE = "item_reference"  # has been replaced by what it stands for, where that is stored


def read_input(value: object) -> list[Item]:
    """Return the items of ``value``; raise ClientError that names the one at fault.

    Items of kinds that only hosted tools or later protocols know are left out, with a line in the log: agents send
    back whatever they have seen.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [MessageItem("user", value)]
    if not isinstance(value, list):
        raise type_error("input", "string or list of items", value)
    if len(value) > MAX_INPUT_ITEMS:
        raise ClientError(f"input has more than {MAX_INPUT_ITEMS} items", param="input")
    items = [_read_item(f"input[{index}]", item) for index, item in enumerate(value)]
    if num_ignored := items.count(None):
        logger.info("left out %d input items of kinds that mean nothing to a text model", num_ignored)
    return [item for item in items if item is not None]


def unsupported(name: str, what: str) -> ClientError:
    """Return the error for a field whose use would change the answer."""
    return ClientError(f"{what} is not supported by this server", param=name, code="unsupported_parameter")


def _read_item(name: str, item: object) -> Item | None:
    if not isinstance(item, dict):
        raise type_error(name, "object", item)
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind == REFERENCE:
        raise unsupported(f"{name}.type", f"an input item of type {quoted(kind)}")
    reader = READERS.get(kind)
    return None if reader is None else reader(name, item)


def _read_message(name: str, item: Mapping[str, Any]) -> Item:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ClientError(f"{name}.role must be one of {', '.join(sorted(ROLES))}", param=f"{name}.role")
    return MessageItem(role, _read_content(f"{name}.content", item.get("content")))


def _read_call(name: str, item: Mapping[str, Any]) -> Item:
    call_id, tool, arguments = (_read_text(name, item, field) for field in ("call_id", "name", "arguments"))
    return FunctionCallItem(call_id, tool, arguments, _read_namespace(name, item))


def _read_custom_call(name: str, item: Mapping[str, Any]) -> Item:
    call_id, tool, text = (_read_text(name, item, field) for field in ("call_id", "name", "input"))
    return CustomCallItem(call_id, tool, text, _read_namespace(name, item))


def _read_output(name: str, item: Mapping[str, Any]) -> Item:
    return FunctionOutputItem(_read_text(name, item, "call_id"), _read_content(f"{name}.output", item.get("output")))


def _read_custom_output(name: str, item: Mapping[str, Any]) -> Item:
    return CustomOutputItem(_read_text(name, item, "call_id"), _read_content(f"{name}.output", item.get("output")))


def _read_built_in_call(name: str, item: Mapping[str, Any]) -> Item | None:
    """Take a call that the client has carried out; one without an id was OpenAI's own affair."""
    if item.get("call_id") is None:
        return None
    _check_payload(name, item, BUILT_IN_CALLS[item["type"]])
    return BuiltInCallItem(_read_text(name, item, "call_id"), dict(item))


def _read_built_in_output(name: str, item: Mapping[str, Any]) -> Item | None:
    kind = item["type"]
    id_field = "id" if kind == "local_shell_call_output" else "call_id"
    if item.get(id_field) is None:
        return None
    field = BUILT_IN_OUTPUTS[kind]
    if kind == "apply_patch_call_output" and item.get(field) is None:  # it may have nothing to say but how it went
        item = {**item, field: _read_text(name, item, "status")}
    _check_payload(name, item, field)
    return BuiltInOutputItem(_read_text(name, item, id_field), dict(item))


def _read_reasoning(name: str, item: Mapping[str, Any]) -> Item | None:
    """Take what was thought, else its summary; what another server has encrypted says nothing to this one."""
    packed = item.get("encrypted_content")
    text = (
        _read_thoughts(f"{name}.content", item.get("content"))
        or (unpack_reasoning(packed) if isinstance(packed, str) else None)
        or _read_thoughts(f"{name}.summary", item.get("summary"))
    )
    return ReasoningItem(text) if text else None


def _read_thoughts(name: str, parts: object) -> str:
    if parts is None:
        return ""
    if not isinstance(parts, list):
        raise type_error(name, "list of parts", parts)
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


READERS: dict[str, Callable[[str, Mapping[str, Any]], Item | None]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_custom_output,
    "reasoning": _read_reasoning,
    **dict.fromkeys(BUILT_IN_CALLS, _read_built_in_call),
    **dict.fromkeys(BUILT_IN_OUTPUTS, _read_built_in_output),
}


def _read_namespace(name: str, item: Mapping[str, Any]) -> str | None:
    return None if item.get("namespace") is None else _read_text(name, item, "namespace")


def _check_payload(name: str, item: Mapping[str, Any], field: str) -> None:
    if item.get(field) is None:
        raise ClientError(f"{name}.{field} is required", param=f"{name}.{field}", code="missing_required_parameter")
    try:
        orjson.dumps([[item]])  # a list of items has them as deep within it
    except TypeError:
        raise ClientError(f"{name} is nested too deeply", param=name) from None


def _read_text(name: str, item: Mapping[str, Any], field: str) -> str:
    text = item.get(field)
    if not isinstance(text, str):
        raise type_error(f"{name}.{field}", "string", text)
    return text


def _read_content(name: str, content: object) -> str:
    """Join text parts with nothing between; null or missing is empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise type_error(name, "string or list of parts", content)
    return "".join(_read_part(f"{name}[{index}]", part) for index, part in enumerate(content))


def _read_part(name: str, part: object) -> str:
    if not isinstance(part, dict):
        raise type_error(name, "object", part)
    kind = part.get("type")
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise unsupported(f"{name}.type", f"a content part of type {quoted(kind)}")
    text = part.get(field)
    if not isinstance(text, str):
        raise type_error(f"{name}.{field}", "string", text)
    return text
