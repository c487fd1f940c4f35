"""Chat messages as clients send them, made into what chat templates can render.

Templates expect every message to have a string ``content`` and tool arguments to be objects; clients
send null, lists of parts, and arguments as JSON text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from aserve.errors import ClientError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
SYSTEM_ROLES = ("system", "developer")
REASONING = ("reasoning", "reasoning_content", "thinking")  # names by which a message has it
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def message_schema() -> dict[str, Any]:
    """Return the JSON schema of one message as clients send it: what ``normalize_messages`` takes."""
    parts = [
        {"type": "object", "required": ["type"], "properties": {"type": {"const": kind}, field: _or_null("string")}}
        for kind, field in sorted(TEXT_PARTS.items())
    ]
    content = {"anyOf": [_or_null("string"), {"type": "array", "items": {"anyOf": parts}}]}
    call = {
        "type": "object",
        "required": ["function"],
        "properties": {
            "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
        },
    }
    calls = {"type": ["array", "null"], "items": call}
    return {
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"enum": sorted(ROLES)}, "content": content, "tool_calls": calls},
    }


def _or_null(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


def normalize_messages(messages: Sequence[Any], *, has_developer_role: bool) -> list[dict[str, Any]]:
    """Return new messages for a template: null fields left out, ``content`` a string, tool arguments objects.

    The role ``developer`` becomes ``system`` unless ``has_developer_role``. Raises ClientError naming the
    message and field that cannot be used.
    """
    if not messages:
        raise ClientError("messages must not be empty", param="messages")
    normalized = [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not has_developer_role:
        for message in normalized:
            if message["role"] == "developer":
                message["role"] = "system"
    return normalized


def join_leading_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with the system messages at their beginning as one, an empty line between their texts.

    Clients send several where many templates take one only, and only as the first message. One for the role
    ``developer`` counts as well; the joined one has the role of the first.
    """
    is_other = (position for position, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES)
    num_leading = next(is_other, len(messages))
    if num_leading < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:num_leading])
    return [{**messages[0], "content": text}, *messages[num_leading:]]


def give_late_system_messages_to_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with those system messages as the user's that do not stand at the beginning."""
    is_other = (position for position, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES)
    num_leading = next(is_other, len(messages))
    later = [
        {**message, "role": "user"} if message["role"] in SYSTEM_ROLES else message
        for message in messages[num_leading:]
    ]
    return [*messages[:num_leading], *later]


def write_out_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with the arguments of calls as JSON text, which some templates add to other text."""
    if not any("tool_calls" in message for message in messages):
        return messages
    return [
        {**message, "tool_calls": [_write_out(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def split_parallel_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with a turn for each call, its results behind it, for templates that take one a turn."""
    if all(len(message.get("tool_calls", ())) < 2 for message in messages):
        return messages
    split: list[dict[str, Any]] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        results = []
        while "tool_calls" in message and position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        split += _one_by_one(message, results) if results else [message]
    return split


def leave_out_empty_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with null for the empty content of those that call, for templates that ask for it."""
    return [
        {**message, "content": None} if "tool_calls" in message and not message["content"] else message
        for message in messages
    ]


def count_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how many characters of content the normalised messages hold."""
    return sum(len(message["content"]) for message in messages)


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message's content, as templates get it; raise ClientError if it is no text."""
    return _join_content(message.get("content"), "content")


def _normalize(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ClientError(f"{where} must be an object", param=where)
    normalized = {key: value for key, value in message.items() if value is not None}
    role = normalized.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ClientError(f"{where}.role must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
    normalized["content"] = _join_content(normalized.get("content"), f"{where}.content")
    if isinstance(reasoning := normalized.get("reasoning"), str):  # templates know the other name
        normalized.setdefault("reasoning_content", reasoning)
    if isinstance(reasoning := normalized.get("reasoning_content"), str) and not normalized["content"]:
        normalized.setdefault("thinking", reasoning)  # gpt-oss's name, which its template takes in place of content
    if calls := _normalize_calls(normalized.pop("tool_calls", []), f"{where}.tool_calls"):
        normalized["tool_calls"] = calls
    return normalized


def _join_content(content: Any, where: str) -> str:
    """Join text parts with nothing between; null or missing content is empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ClientError(f"{where} must be a string or a list of parts", param=where)
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        named = f"of type {kind[:64]!r}" if isinstance(kind, str) else "without a type"
        raise ClientError(f"{where} is a part {named}; this model takes text only", param=where)
    text = part.get(field)
    if text is not None and not isinstance(text, str):
        raise ClientError(f"{where}.{field} must be a string", param=f"{where}.{field}")
    return text or ""


def _normalize_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise ClientError(f"{where} must be a list", param=where)
    return [_normalize_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _normalize_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ClientError(f"{where} must have a function with a name", param=where)
    return {**call, "function": {**function, "arguments": _parse_arguments(function.get("arguments"))}}


def _one_by_one(message: Mapping[str, Any], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a turn for each call of ``message``; results that name none of them come last."""
    turns: list[dict[str, Any]] = []
    by_id: dict[str | None, list[dict[str, Any]]] = {}
    for result in reversed(results):
        by_id.setdefault(_id_in(result, "tool_call_id"), []).append(result)
    answered: set[int] = set()
    further = {**{name: value for name, value in message.items() if name not in REASONING}, "content": ""}
    for index, call in enumerate(message["tool_calls"]):
        turns.append({**(further if index else message), "tool_calls": [call]})
        if found := by_id.get(_id_in(call, "id")):
            turns.append(found.pop())
            answered.add(id(turns[-1]))
    return turns + [result for result in results if id(result) not in answered]


def _id_in(holder: Mapping[str, Any], name: str) -> str | None:
    """Return the id, None if there is none or it is no string: clients may send anything."""
    value = holder.get(name)
    return value if isinstance(value, str) else None


def _write_out(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _parse_arguments(arguments: Any) -> Any:
    """Return the arguments as an object; text that is not JSON for one, as a model may write, stays text."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments
