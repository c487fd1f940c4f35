"""A message in the output of a response while it grows: its text and log probabilities, each encoded once."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

Logprobs = Sequence[Mapping[str, Any]]


class OpenMessage:
    """One output item of type ``message`` with one text part."""

    __slots__ = ("_logprobs", "_texts", "item_id", "place")

    def __init__(self, item_id: str, output_index: int) -> None:
        self.item_id = item_id
        self.place = {"item_id": item_id, "output_index": output_index, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []  # the encoded entries of each delta, without brackets

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    def add(self, text: str, logprobs: Logprobs) -> bytes:
        """Append what is new; return ``logprobs`` encoded."""
        self._texts.append(text)
        if not logprobs:
            return b"[]"
        encoded = orjson.dumps(logprobs)
        self._logprobs.append(encoded[1:-1])
        return encoded

    def started(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the item and its part as they are announced."""
        return self._item("in_progress", []), {"type": "output_text", "text": "", "annotations": [], "logprobs": []}

    def finished(self, status: str) -> tuple[dict[str, orjson.Fragment], orjson.Fragment, orjson.Fragment]:
        """Return text and log probabilities, the part and the item."""
        parts = {
            "text": orjson.Fragment(orjson.dumps(self.text)),
            "logprobs": orjson.Fragment(b"[%b]" % b",".join(self._logprobs)),
        }
        part = encoded({"type": "output_text", "annotations": [], **parts})
        return parts, part, encoded(self._item(status, [part]))

    def _item(self, status: str, content: list[orjson.Fragment]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def encoded(value: object) -> orjson.Fragment:
    """Return ``value`` as JSON that is copied, not encoded again, wherever it is used."""
    return orjson.Fragment(orjson.dumps(value))
