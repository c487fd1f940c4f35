"""The conversation of /v1/messages, checked and turned into messages for a chat template; no I/O.

A turn of the model is one message with what it thought, said and called; results of tools, which clients send in a
turn of the user, are messages of their own. Turns of one role that follow each other are one turn.
"""

import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aserve.errors import ClientError

ROLES = ("user", "assistant", "system")
MAX_BLOCKS = 10_000  # in all messages, those in results of tools included; each takes microseconds of the event loop
TURN_SEPARATOR = "\n\n"
# What coding agents put first for the bill; it differs in each request, so that nothing after it would be found cached.
BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
Block = tuple[str, Mapping[str, Any]]  # where it stands, and itself


def read_conversation(
    messages: Sequence[Mapping[str, Any]], system: str | list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return what the template takes; raise ClientError that names the message or block at fault."""
    if _count_blocks(messages) > MAX_BLOCKS:
        raise ClientError(f"messages has more than {MAX_BLOCKS} content blocks", param="messages")
    instructions = "" if system is None else _read_system(system)
    spoken = [{"role": "system", "content": instructions}] if instructions else []
    for index, message in enumerate(messages):
        spoken += _read_message(f"messages[{index}]", message)
    return _join_turns(spoken)


def _count_blocks(messages: Iterable[object]) -> int:
    """Return how many blocks there are, and how many within them."""
    blocks = [block for message in messages for block in _list_in(message)]
    return len(blocks) + sum(len(_list_in(block)) for block in blocks)


def _list_in(holder: object) -> list[Any]:
    content = holder.get("content") if isinstance(holder, Mapping) else None
    return content if isinstance(content, list) else []


def _read_system(system: str | list[dict[str, Any]]) -> str:
    texts = (_read_string(where, block, "text") for where, block in _read_blocks("system", system, TEXT_BLOCKS))
    return "".join(BILLING_LINE.sub("", text) for text in texts)


def _read_message(where: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    role = message.get("role")
    if role not in ROLES:
        raise ClientError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    content_at, content = f"{where}.content", message.get("content")
    if role == "system":
        return [{"role": "system", "content": _read_texts(content_at, content)}]
    blocks = _read_blocks(content_at, content, ASSISTANT_BLOCKS if role == "assistant" else USER_BLOCKS)
    if role == "user" and not blocks:
        raise ClientError(f"{content_at} must not be empty", param=content_at)
    return [_assistant_turn(blocks)] if role == "assistant" else list(_user_turn(blocks))


def _assistant_turn(blocks: Iterable[Block]) -> dict[str, Any]:
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        kind = block["type"]
        if kind == "tool_use":
            calls.append(_read_call(where, block))
        elif kind in texts:
            texts[kind].append(_read_string(where, block, kind))
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts["text"])}
    if thought := "".join(texts["thinking"]):
        turn["reasoning_content"] = thought
    if calls:
        turn["tool_calls"] = calls
    return turn


def _user_turn(blocks: Iterable[Block]) -> Iterable[dict[str, Any]]:
    """Yield results of tools and what was said, in the order of the blocks."""
    texts: list[str] = []
    for where, block in blocks:
        if block["type"] == "text":
            texts.append(_read_string(where, block, "text"))
            continue
        if texts:
            yield {"role": "user", "content": "".join(texts)}
            texts = []
        yield _read_result(where, block)
    if texts:
        yield {"role": "user", "content": "".join(texts)}


def _read_call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise ClientError(f"{where}.input must be an object", param=f"{where}.input")
    function = {"name": _read_string(where, block, "name"), "arguments": arguments}
    return {"id": _read_string(where, block, "id"), "type": "function", "function": function}


def _read_result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else _read_texts(f"{where}.content", content)
    if block.get("is_error") is True and not text.lower().startswith("error"):  # templates have no other place for it
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _read_string(where, block, "tool_use_id"), "content": text}


def _read_texts(where: str, content: object) -> str:
    """Return a string, or text blocks joined with nothing between."""
    return "".join(_read_string(at, block, "text") for at, block in _read_blocks(where, content, TEXT_BLOCKS))


def _read_blocks(where: str, content: object, kinds: frozenset[str]) -> list[Block]:
    """Return the blocks of ``content``, a string or a list, all of them of ``kinds``."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise ClientError(f"{where} must be a string or a list of blocks", param=where)
    return [
        (f"{where}[{index}]", _check_kind(f"{where}[{index}]", block, kinds)) for index, block in enumerate(content)
    ]


def _check_kind(where: str, block: object, kinds: frozenset[str]) -> Mapping[str, Any]:
    if not isinstance(block, Mapping):
        raise ClientError(f"{where} must be an object", param=where)
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        named = f"a block of type {kind[:64]!r}" if isinstance(kind, str) else "a block without a type"
        raise ClientError(
            f"{where} is {named}; supported here: {', '.join(sorted(kinds))}", param=where, code="unsupported_parameter"
        )
    return block


def _read_string(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ClientError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value


TEXT_BLOCKS = frozenset({"text"})
USER_BLOCKS = TEXT_BLOCKS | {"tool_result"}
# What was redacted is encrypted for somebody else and says nothing here.
ASSISTANT_BLOCKS = TEXT_BLOCKS | {"thinking", "redacted_thinking", "tool_use"}


def _join_turns(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for role, group in itertools.groupby(messages, operator.itemgetter("role")):
        turns = list(group)
        joined += turns if role == "tool" else [_joined(role, turns)]
    return joined


def _joined(role: str, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": role, "content": TURN_SEPARATOR.join(filter(None, _all(turns, "content")))}
    if thoughts := _all(turns, "reasoning_content"):
        turn["reasoning_content"] = TURN_SEPARATOR.join(thoughts)
    if calls := _all(turns, "tool_calls"):
        turn["tool_calls"] = list(itertools.chain.from_iterable(calls))
    return turn


def _all(turns: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [turn[name] for turn in turns if name in turn]
