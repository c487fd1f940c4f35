"""A call as a JSON object with a name and arguments, which are passed on while they are written."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import orjson

from aserve.parsing.call_reader import CallSequence, ReaderState
from aserve.parsing.deltas import ParsedDelta
from aserve.parsing.markers import SPACES, skip_tail
from aserve.parsing.spans import ValueSpan

ARGUMENTS = ("arguments", "parameters")
BARE_KEYS = ("name", "type", "id", *ARGUMENTS)
NOT_JSON = object()


class JsonCall:
    """Reads ``{"name": ..., "arguments": {...}}`` and then ``tail``.

    If the name comes first, the arguments are passed on as they are written. With ``names``, an object that calls none
    of them, or has keys that a call has not, is no call.
    """

    def __init__(self, calls: CallSequence, tail: Sequence[str] = (), names: Collection[str] | None = None) -> None:
        self.state = ReaderState.OPEN
        self.rest = ""
        self._calls = calls
        self._tail = list(tail)
        self._names = names
        self._buffer = ""
        self._raw = ""  # everything so far, until a call has begun
        self._key = ""
        self._text = ""  # of the key or value that is being read
        self._name: str | None = None
        self._arguments = "null"  # as they are written
        self._span = ValueSpan()
        self._is_started = False
        self._step: Callable[[list[ParsedDelta]], bool] = self._read_opening

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        self._buffer += text
        if not self._is_started:
            self._raw += text
        deltas: list[ParsedDelta] = []
        while self.state is ReaderState.OPEN and self._advance(deltas):
            pass
        return deltas

    def flush(self) -> list[ParsedDelta]:
        """Learn that no more text comes."""
        if self.state is ReaderState.OPEN:
            self._end("")
        return []

    def _advance(self, deltas: list[ParsedDelta]) -> bool:
        """Do one step if the buffer is enough for it."""
        if not self._is_within_value():
            self._buffer = self._buffer.lstrip(SPACES)
        return bool(self._buffer) and self._step(deltas)

    def _is_within_value(self) -> bool:
        return self._step == self._pass_arguments or bool(self._text)

    def _end(self, rest: str) -> None:
        """Stop here: a call that has begun stays one, anything else was none."""
        self.state = ReaderState.DONE if self._is_started else ReaderState.FAILED
        self.rest = rest if self._is_started else self._raw

    def _read_opening(self, deltas: list[ParsedDelta]) -> bool:
        return self._expect("{", self._read_key)

    def _read_key(self, deltas: list[ParsedDelta]) -> bool:
        if not self._text:
            if self._buffer[0] == "}":
                return self._close(deltas)
            if self._buffer[0] != '"':
                return self._break_off()
        if (text := self._take_text()) is None:
            return False
        key = parse_json(text)
        if not isinstance(key, str) or (self._names is not None and key not in BARE_KEYS):
            return self._break_off()
        self._key = key
        self._step = self._read_colon
        return True

    def _read_colon(self, deltas: list[ParsedDelta]) -> bool:
        return self._expect(":", self._read_value)

    def _read_value(self, deltas: list[ParsedDelta]) -> bool:
        begins_object = not self._text and self._buffer[0] == "{"
        if begins_object and self._key in ARGUMENTS and self._name is not None and not self._is_started:
            self._start(self._name, deltas)
            self._span = ValueSpan()
            self._step = self._pass_arguments
            return True
        if (text := self._take_text()) is None:
            return False
        if (value := parse_json(text)) is NOT_JSON:
            return self._break_off()
        if self._key in ARGUMENTS:
            self._arguments = text
        elif self._key == "name":
            self._name = value if isinstance(value, str) else None
            if self._names is not None and self._name not in self._names:
                return self._break_off()
        self._step = self._read_comma
        return True

    def _pass_arguments(self, deltas: list[ParsedDelta]) -> bool:
        end = self._span.scan(self._buffer)
        piece = self._buffer if end is None else self._buffer[:end]
        deltas.append(self._calls.arguments(piece))
        self._buffer = self._buffer[len(piece) :]
        if end is None:
            return False
        self._step = self._read_comma
        return True

    def _read_comma(self, deltas: list[ParsedDelta]) -> bool:
        if self._buffer[0] == "}":
            return self._close(deltas)
        return self._expect(",", self._read_key)

    def _expect(self, char: str, step: Callable[[list[ParsedDelta]], bool]) -> bool:
        if self._buffer[0] != char:
            return self._break_off()
        self._buffer = self._buffer[1:]
        self._step = step
        return True

    def _take_text(self) -> str | None:
        """Return the text of the next value once it is complete."""
        if not self._text:
            self._span = ValueSpan()
        end = self._span.scan(self._buffer)
        piece = self._buffer if end is None else self._buffer[:end]
        self._text += piece
        self._buffer = self._buffer[len(piece) :]
        if end is None:
            return None
        text, self._text = self._text, ""
        return text

    def _break_off(self) -> bool:
        """Deal with text that belongs to no call; behind finished arguments only the tail is left to look for."""
        if self._is_started:
            self._step = self._read_tail
            return True
        self._end("")
        return False

    def _close(self, deltas: list[ParsedDelta]) -> bool:
        """Read the brace at the end; begin the call if that was not possible before."""
        self._buffer = self._buffer[1:]
        if not self._is_started:
            arguments = object_text(self._arguments)
            if self._name is None or arguments is None:
                return self._break_off()
            self._start(self._name, deltas)
            deltas.append(self._calls.arguments(arguments))
        self._step = self._read_tail
        if not self._tail:
            self._end(self._buffer)
        return True

    def _start(self, name: str, deltas: list[ParsedDelta]) -> None:
        self._is_started = True
        self._raw = ""
        deltas.append(self._calls.start(name))

    def _read_tail(self, deltas: list[ParsedDelta]) -> bool:
        self._buffer, is_read = skip_tail(self._buffer, self._tail)
        if is_read:
            self._end(self._buffer)
        return False


def parse_json(text: str) -> Any:
    """Return the value of ``text``, NOT_JSON if it has none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return NOT_JSON


def object_text(text: str) -> str | None:
    """Return the text of an object, be it written as one, in a string, or left out; None for any other value."""
    value = parse_json(text)
    if isinstance(value, str):
        text = value or "null"
        value = parse_json(text)
    if value is None:
        return "{}"
    return text if isinstance(value, dict) else None
