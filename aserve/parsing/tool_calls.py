"""Calls among text: finds where one begins, has it read, and passes on what is text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aserve.parsing.call_reader import CallReader, CallSequence, ReaderState, call_id
from aserve.parsing.deltas import ParsedDelta
from aserve.parsing.markers import SPACES, MarkerSet, TextGate

Tools = Mapping[str, Any]
"""The functions that may be called: name -> JSON schema of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family of models writes calls.

    A call begins behind one of ``markers``, or, while the answer has no text yet, with ``bare``. ``noise`` are markers
    without a meaning of their own, ``inner_markers`` those that only the reader looks for; ``separators`` are the
    characters that may stand around calls.
    """

    markers: tuple[str, ...]
    make_reader: Callable[[CallSequence, Tools], CallReader]
    bare: str = ""
    make_bare_reader: Callable[[CallSequence, Tools], CallReader] | None = None
    noise: tuple[str, ...] = ()
    inner_markers: tuple[str, ...] = ()
    separators: str = SPACES
    make_id: Callable[[], str] = call_id


class ToolCallParser:
    """Reads one answer in ``call_format``. White space around calls is no text."""

    def __init__(self, call_format: CallFormat, tools: Tools) -> None:
        self._format = call_format
        self._tools = tools
        self._calls = CallSequence(call_format.make_id)
        self._markers = MarkerSet((*call_format.markers, *call_format.noise))
        self._gate = TextGate(call_format.separators)
        self._buffer = ""
        self._reader: CallReader | None = None
        self._marker = ""  # that ``_reader`` was begun by
        self._is_bare_possible = bool(call_format.bare)
        self._is_behind_calls = False  # nothing but separators since the last call
        self._is_within_text = False  # and only a marker can change that

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        if self._is_within_text and not self._buffer and not self._markers.may_begin_in(text):
            return self._gate.push(text)  # nearly every piece
        self._buffer += text
        deltas: list[ParsedDelta] = []
        while self._buffer and self._advance(deltas):
            pass
        return deltas

    def flush(self) -> list[ParsedDelta]:
        """Return what was held back; the beginning of a call that is none is text."""
        deltas: list[ParsedDelta] = []
        while self._reader is not None:
            self._take(self._reader, self._reader.flush(), deltas)
            while self._buffer and self._advance(deltas):
                pass
        self._show(self._buffer, deltas)
        self._buffer = ""
        if not self._is_behind_calls:
            deltas += self._gate.flush()
        return deltas

    def _advance(self, deltas: list[ParsedDelta]) -> bool:
        """Do one step; False if it takes more text to go on."""
        if self._reader is not None:
            piece, self._buffer = self._buffer, ""
            self._take(self._reader, self._reader.push(piece), deltas)
            return self._reader is None
        return (self._is_bare_possible and self._read_bare()) or self._read_marked(deltas)

    def _read_bare(self) -> bool:
        behind = self._buffer.lstrip(self._format.separators)
        if not behind.startswith(self._format.bare):
            return False
        self._gate.push(self._buffer[: len(self._buffer) - len(behind)])
        make_reader = self._format.make_bare_reader or self._format.make_reader
        self._reader, self._marker, self._buffer = make_reader(self._calls, self._tools), "", behind
        return True

    def _read_marked(self, deltas: list[ParsedDelta]) -> bool:
        text, marker, self._buffer = self._markers.cut(self._buffer)
        self._show(text, deltas)
        if not marker:
            return False
        if marker in self._format.markers:
            self._reader, self._marker = self._format.make_reader(self._calls, self._tools), marker
            self._is_within_text = False
        return True

    def _take(self, reader: CallReader, found: list[ParsedDelta], deltas: list[ParsedDelta]) -> None:
        """Pass on what ``reader`` found; when it is through, what it has left is read again."""
        if found:
            self._gate.drop()
            self._is_behind_calls = True
            deltas += found
        if reader.state is ReaderState.OPEN:
            return
        self._reader = None
        self._buffer = reader.rest + self._buffer
        if reader.state is ReaderState.FAILED:
            self._is_bare_possible = False
            self._show(self._marker, deltas)

    def _show(self, text: str, deltas: list[ParsedDelta]) -> None:
        if text.strip(self._format.separators):
            self._is_bare_possible = False
            self._is_behind_calls = False
            self._is_within_text = True
        deltas += self._gate.push(text)
