"""A call as Qwen3-Coder writes it: ``<function=name><parameter=key>value</parameter></function>``."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from aserve.parsing.call_reader import CallSequence, ReaderState
from aserve.parsing.deltas import ParsedDelta
from aserve.parsing.json_call import NOT_JSON, parse_json
from aserve.parsing.markers import SPACES, MarkerSet, skip_tail

FUNCTION = re.compile(r"\s*<function=([^>\n]{1,256})>")
PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>")
MAX_OPENING_CHARS = 512
END_OF_VALUE = "</parameter>"
END_OF_CALL = "</function>"
STRING_ENDS = MarkerSet((f"\n{END_OF_VALUE}", END_OF_VALUE))


class XmlCall:
    """Reads one call and ``tail``. Values become what the schema of ``tools`` says.

    A string is passed on while it is written, any other value when it is complete. One whose type the schema leaves
    open is read as JSON, and is a string if it is not that.
    """

    def __init__(self, calls: CallSequence, tail: Sequence[str], tools: Mapping[str, Any]) -> None:
        self.state = ReaderState.OPEN
        self.rest = ""
        self._calls = calls
        self._tail = list(tail)
        self._tools = tools
        self._buffer = ""
        self._properties: Mapping[str, Any] | None = None  # once the call has begun
        self._num_values = 0
        self._is_in_string = False
        self._is_at_start = False  # of the string, so that a line end still belongs to its tag
        self._is_closed = False
        self._pieces: list[str] = []  # that are not in the buffer yet
        self._value_end: str | None = None  # of the value that goes on, as long as what ends one may begin in it

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        self._pieces.append(text)
        if self._value_end is not None and not self._ends_value(text):
            return []  # nearly every piece of a long value
        self._buffer += "".join(self._pieces)
        self._pieces.clear()
        deltas: list[ParsedDelta] = []
        while self.state is ReaderState.OPEN and self._advance(deltas):
            pass
        return deltas

    def flush(self) -> list[ParsedDelta]:
        """Learn that no more text comes."""
        if self._properties is None:
            self.state, self.rest = ReaderState.FAILED, self._buffer
        elif self.state is ReaderState.OPEN:
            self.state = ReaderState.DONE
        return []

    def _ends_value(self, text: str) -> bool:
        seen = f"{self._value_end}{text}"
        self._value_end = seen[1 - len(END_OF_VALUE) :]
        return END_OF_VALUE in seen

    def _advance(self, deltas: list[ParsedDelta]) -> bool:
        if self._properties is None:
            return self._read_opening(deltas)
        if self._is_in_string:
            return self._pass_string(deltas)
        if self._is_closed:
            self._buffer, is_read = skip_tail(self._buffer, self._tail)
            if is_read:
                self.state, self.rest = ReaderState.DONE, self._buffer
            return False
        self._buffer = self._buffer.lstrip(SPACES)
        return self._read_parameter(self._properties, deltas)

    def _read_opening(self, deltas: list[ParsedDelta]) -> bool:
        opening = FUNCTION.match(self._buffer[:MAX_OPENING_CHARS])
        if opening is None:
            if len(self._buffer) >= MAX_OPENING_CHARS:
                self.state, self.rest = ReaderState.FAILED, self._buffer
            return False
        name = opening[1].strip()
        self._properties = properties_of(self._tools.get(name))
        self._buffer = self._buffer[opening.end() :]
        deltas += [self._calls.start(name), self._calls.arguments("{")]
        return True

    def _read_parameter(self, properties: Mapping[str, Any], deltas: list[ParsedDelta]) -> bool:
        opening = PARAMETER.match(self._buffer[:MAX_OPENING_CHARS])
        if opening is None:
            return self._read_end(deltas)
        key = opening[1].strip()
        if _is_string(properties.get(key)):
            deltas.append(self._calls.arguments(self._begin_pair(key) + '"'))
            self._buffer = self._buffer[opening.end() :]
            self._is_in_string = self._is_at_start = True
            return True
        end = self._buffer.find(END_OF_VALUE, opening.end())
        if end < 0:
            self._value_end = self._buffer[1 - len(END_OF_VALUE) :]
            return False
        self._value_end = None
        text = self._buffer[opening.end() : end]
        value = convert_value(text.removeprefix("\n").removesuffix("\n"))
        deltas.append(self._calls.arguments(self._begin_pair(key) + orjson.dumps(value).decode()))
        self._buffer = self._buffer[end + len(END_OF_VALUE) :]
        return True

    def _begin_pair(self, key: str) -> str:
        self._num_values += 1
        return f"{', ' if self._num_values > 1 else ''}{orjson.dumps(key).decode()}: "

    def _pass_string(self, deltas: list[ParsedDelta]) -> bool:
        """Pass on what is certain to be in the string; JSON escapes each character by itself."""
        if self._is_at_start and self._buffer:
            self._buffer = self._buffer.removeprefix("\n")
            self._is_at_start = False
        text, marker, self._buffer = STRING_ENDS.cut(self._buffer)
        self._is_in_string = not marker
        if text or marker:
            quote = '"' if marker else ""
            deltas.append(self._calls.arguments(orjson.dumps(text).decode()[1:-1] + quote))
        return bool(marker)

    def _read_end(self, deltas: list[ParsedDelta]) -> bool:
        """Close the object at the end of the call, and where something stands that belongs to no call."""
        is_end = self._buffer.startswith(END_OF_CALL)
        is_undecided = END_OF_CALL.startswith(self._buffer) or self._begins_parameter()
        if not is_end and is_undecided:
            return False
        deltas.append(self._calls.arguments("}"))
        self._buffer = self._buffer.removeprefix(END_OF_CALL)
        self._is_closed = True
        return True

    def _begins_parameter(self) -> bool:
        start = "<parameter="
        if len(self._buffer) <= len(start):
            return start.startswith(self._buffer)
        is_name = self._buffer.startswith(start) and "\n" not in self._buffer[:MAX_OPENING_CHARS]
        return is_name and len(self._buffer) < MAX_OPENING_CHARS


def properties_of(schema: Any) -> Mapping[str, Any]:
    """Return the properties that ``schema`` names, if it is one of an object."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def convert_value(text: str) -> Any:
    """Return the value that ``text`` stands for where the schema does not ask for a string."""
    value = parse_json({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    return text if value is NOT_JSON else value


def _is_string(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"
