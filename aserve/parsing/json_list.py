"""Calls as a JSON list of objects."""

from aserve.parsing.call_reader import CallSequence, ReaderState
from aserve.parsing.deltas import ParsedDelta
from aserve.parsing.json_call import JsonCall
from aserve.parsing.markers import SPACES


class JsonCallList:
    """Reads ``[{...}, {...}]``. What is wrong behind the first call ends the list and is text."""

    def __init__(self, calls: CallSequence) -> None:
        self.state = ReaderState.OPEN
        self.rest = ""
        self._calls = calls
        self._buffer = ""
        self._raw = ""  # everything so far, until a call has begun
        self._call: JsonCall | None = None
        self._first_call = calls.count
        self._expected = "["

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        self._buffer += text
        if not self._has_calls:
            self._raw += text
        deltas: list[ParsedDelta] = []
        while self.state is ReaderState.OPEN and self._buffer and self._advance(deltas):
            pass
        return deltas

    def flush(self) -> list[ParsedDelta]:
        """Learn that no more text comes."""
        if self.state is ReaderState.OPEN:
            self._end("")
        return []

    @property
    def _has_calls(self) -> bool:
        return self._calls.count > self._first_call

    def _end(self, rest: str) -> None:
        self.state = ReaderState.DONE if self._has_calls else ReaderState.FAILED
        self.rest = rest if self._has_calls else self._raw

    def _advance(self, deltas: list[ParsedDelta]) -> bool:
        if self._call is not None:
            return self._read_call(self._call, deltas)
        self._buffer = self._buffer.lstrip(SPACES)
        if not self._buffer:
            return False
        char = self._buffer[0]
        if char not in self._expected:
            self._end(self._buffer)
        elif char == "{":
            self._call = JsonCall(self._calls)
        else:
            self._buffer = self._buffer[1:]
            self._expected = "{"
            if char == "]":
                self._end(self._buffer)
        return True

    def _read_call(self, call: JsonCall, deltas: list[ParsedDelta]) -> bool:
        deltas += call.push(self._buffer)
        self._buffer = ""
        if call.state is ReaderState.OPEN:
            return False
        self._call, self._buffer, self._expected = None, call.rest, ",]"
        if call.state is ReaderState.FAILED:
            self._end(self._buffer)
        return True
