"""Items of a conversation, as a Responses lane keeps them, and the chat messages they make for a template."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MessageItem:
    """What somebody said."""

    role: str
    text: str


Item = MessageItem


def chat_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return ``items`` as the tokenizer's chat template takes them."""
    return [{"role": item.role, "content": item.text} for item in items]
