"""Chat messages as clients send them, brought into the one form that every chat template takes; no I/O."""

from typing import Any

from aserve.errors import ClientError

MAX_MESSAGES = 4096

ROLES = {
    "system": "system",
    "developer": "system",  # what newer clients call it; templates know only the older name
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of a part -> its field with the text
PASSED_ON = ("name", "tool_calls", "tool_call_id", "reasoning_content")  # templates read them or leave them


def normalize_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Return ``messages`` with plain string contents; raise ClientError for what a text model cannot take."""
    if not messages:
        raise ClientError("messages must not be empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise ClientError(f"there are more than {MAX_MESSAGES} messages", param="messages")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ClientError(f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ClientError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    normalized = {"role": ROLES[role], "content": _join(message.get("content"), f"{where}.content")}
    for name in PASSED_ON:
        if message.get(name) is not None:
            normalized[name] = message[name]
    _check_tool_calls(normalized.get("tool_calls", []), f"{where}.tool_calls")
    return normalized


def _join(content: Any, where: str) -> str:
    """Return the text of a content: a string, nothing, or text parts, joined with nothing between."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ClientError(f"{where} must be a string or a list of parts", param=where)
    return "".join(_text_of(part, f"{where}[{index}]") for index, part in enumerate(content))


def _text_of(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise ClientError(f"{where} must be an object with a type", param=where)
    if kind not in TEXT_PARTS:
        raise ClientError(f"{where}: this model takes text only", param=where, code="unsupported_content")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ClientError(f"{where}.{TEXT_PARTS[kind]} must be a string", param=where)
    return text


def _check_tool_calls(calls: Any, where: str) -> None:
    """Templates index into calls and fail on other shapes."""
    is_list = isinstance(calls, list)
    if not is_list or not all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls):
        raise ClientError(f"{where} must be a list of objects with a function", param=where)
