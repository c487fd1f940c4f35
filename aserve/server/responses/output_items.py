"""The items in the output of a response while they grow: what announces each, what is new, what ends it.

What an item says is encoded once and copied wherever it appears.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from aserve.parsing.answer_reader import is_object
from aserve.server.responses.custom_input import CustomInput
from aserve.server.responses.items import CustomCallItem, FunctionCallItem, Item, MessageItem, ReasoningItem
from aserve.server.responses.portable_reasoning import pack_reasoning
from aserve.server.responses.tools import ToolName

Logprobs = Sequence[Mapping[str, Any]]
Fields = tuple[str, dict[str, Any]]  # the type of an event and what it says


@dataclass(frozen=True, slots=True)
class ClosedItem:
    """An item as it ended: ``events`` come before the one that says so, if ``is_done``; a continuation has ``kept``."""

    events: list[Fields]
    item: orjson.Fragment
    kept: Item | None
    is_done: bool = True


class OpenItem(Protocol):
    """An output item that goes on; its delta events are of ``delta_type`` and say ``place`` besides what is new."""

    delta_type: str
    place: dict[str, Any]

    def announced(self) -> dict[str, Any]:
        """Return the item as it is announced."""

    def opening(self) -> list[Fields]:
        """Return what follows its announcement."""

    def close(self, status: str) -> ClosedItem:
        """End it; ``status`` is "completed" or "incomplete"."""


class OpenMessage:
    """A message with one text part."""

    delta_type = "response.output_text.delta"

    def __init__(self, item_id: str, output_index: int) -> None:
        self.place = {"item_id": item_id, "output_index": output_index, "content_index": 0}
        self._item_id = item_id
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []  # the encoded entries of each delta, without brackets

    def add(self, text: str, logprobs: Logprobs) -> bytes:
        """Append what is new; return ``logprobs`` encoded."""
        self._texts.append(text)
        if not logprobs:
            return b"[]"
        entries = orjson.dumps(logprobs)
        self._logprobs.append(entries[1:-1])
        return entries

    def announced(self) -> dict[str, Any]:
        """Return the item without its part."""
        return self._item("in_progress", [])

    def opening(self) -> list[Fields]:
        """Return the announcement of the part."""
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [("response.content_part.added", {**self.place, "part": part})]

    def close(self, status: str) -> ClosedItem:
        """End text, part and item."""
        text = "".join(self._texts)
        parts = {
            "text": orjson.Fragment(orjson.dumps(text)),
            "logprobs": orjson.Fragment(b"[%b]" % b",".join(self._logprobs)),
        }
        part = encoded({"type": "output_text", "annotations": [], **parts})
        events: list[Fields] = [
            ("response.output_text.done", {**self.place, **parts}),
            ("response.content_part.done", {**self.place, "part": part}),
        ]
        kept = MessageItem("assistant", text) if text else None
        return ClosedItem(events, encoded(self._item(status, [part])), kept)

    def _item(self, status: str, content: list[orjson.Fragment]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}


class OpenReasoning:
    """What the model thinks, with one text part; ``is_packed`` adds it as ``encrypted_content`` too."""

    delta_type = "response.reasoning_text.delta"

    def __init__(self, item_id: str, output_index: int, *, is_packed: bool) -> None:
        self.place = {"item_id": item_id, "output_index": output_index, "content_index": 0}
        self._item_id = item_id
        self._is_packed = is_packed
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        """Append what is new."""
        self._texts.append(text)

    def announced(self) -> dict[str, Any]:
        """Return the item without its part."""
        return self._item("in_progress", [])

    def opening(self) -> list[Fields]:
        """Return the announcement of the part."""
        return [("response.content_part.added", {**self.place, "part": {"type": "reasoning_text", "text": ""}})]

    def close(self, status: str) -> ClosedItem:
        """End text, part and item."""
        text = "".join(self._texts)
        shown = orjson.Fragment(orjson.dumps(text))
        part = encoded({"type": "reasoning_text", "text": shown})
        events: list[Fields] = [
            ("response.reasoning_text.done", {**self.place, "text": shown}),
            ("response.content_part.done", {**self.place, "part": part}),
        ]
        item = self._item(status, [part])
        if self._is_packed:
            item["encrypted_content"] = pack_reasoning(text)
        return ClosedItem(events, encoded(item), ReasoningItem(text) if text else None)

    def _item(self, status: str, content: list[orjson.Fragment]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


class OpenCall:
    """A call of a tool.

    An incomplete one is not reported as done, for agents run what is; a continuation is not told of it.
    """

    def __init__(self, item_id: str, output_index: int, call_id: str, tool: ToolName) -> None:
        self.place = {"item_id": item_id, "output_index": output_index}
        self._item_id = item_id
        self._call_id = call_id
        self._tool = tool
        self._texts: list[str] = []
        self._input = CustomInput() if tool.is_custom else None
        self._done_type = "response.function_call_arguments.done"
        self.delta_type = "response.function_call_arguments.delta"
        if tool.is_custom:
            self._done_type = "response.custom_tool_call_input.done"
            self.delta_type = "response.custom_tool_call_input.delta"

    def add(self, arguments: str) -> str:
        """Append more of the arguments; return what is new of what the client is shown."""
        text = arguments if self._input is None else self._input.push(arguments)
        self._texts.append(text)
        return text

    def rest(self) -> str:
        """Return what was held back, at the end of the arguments."""
        text = "" if self._input is None else self._input.flush()
        self._texts.append(text)
        return text

    def is_whole(self, *, has_stopped: bool) -> bool:
        """Whether nothing is missing: an answer may end within it, at a stop string for one.

        ``has_stopped``: the answer has not reached its length, nor was it ended.
        """
        if self._input is not None:
            return self._input.is_whole(has_stopped=has_stopped)
        return is_object("".join(self._texts))

    def announced(self) -> dict[str, Any]:
        """Return the item with nothing in it."""
        return self._item("in_progress", "")

    def opening(self) -> list[Fields]:
        """Return nothing: a call has no parts."""
        return []

    def close(self, status: str) -> ClosedItem:
        """End arguments and item."""
        text = "".join(self._texts)
        if status != "completed":
            return ClosedItem([], encoded(self._item(status, text)), None, is_done=False)
        said = {"input": text} if self._tool.is_custom else {"name": self._tool.name, "arguments": text}
        make_item = CustomCallItem if self._tool.is_custom else FunctionCallItem
        kept = make_item(self._call_id, self._tool.name, text, self._tool.namespace)
        item = encoded(self._item("completed", text))
        return ClosedItem([(self._done_type, {**self.place, **said})], item, kept)

    def _item(self, status: str, text: str) -> dict[str, Any]:
        kind, field = ("custom_tool_call", "input") if self._tool.is_custom else ("function_call", "arguments")
        namespace = {} if self._tool.namespace is None else {"namespace": self._tool.namespace}
        call = {"call_id": self._call_id, "name": self._tool.name, **namespace, field: text}
        return {"id": self._item_id, "type": kind, "status": status, **call}


def encoded(value: object) -> orjson.Fragment:
    """Return ``value`` as JSON that is copied, not encoded again, wherever it is used."""
    return orjson.Fragment(orjson.dumps(value))
