"""A call whose name stands in front of its arguments, as Mistral's and DeepSeek's models write it."""

import re
from collections.abc import Sequence

from aserve.parsing.call_reader import CallSequence, ReaderState
from aserve.parsing.deltas import ParsedDelta
from aserve.parsing.markers import skip_tail
from aserve.parsing.spans import ValueSpan

MAX_HEADER_CHARS = 512

MISTRAL_HEADER = re.compile(r"\s*(?P<name>[\w.:/-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")
DEEPSEEK_HEADER = re.compile(
    "\\s*(?:function<\uff5ctool\u2581sep\uff5c>(?P<name>[^\\n<{]+)\\n```(?:json)?\\s*"  # V3, R1
    "|(?P<later_name>[^\\s<{]+)<\uff5ctool\u2581sep\uff5c>\\s*)(?=\\{)"  # from V3.1 on
)
DEEPSEEK_TAIL = ("```", "<\uff5ctool\u2581call\u2581end\uff5c>")


class HeadedCall:
    """Reads ``header``, whose groups name the function, an object, and ``tail``."""

    def __init__(self, calls: CallSequence, header: re.Pattern[str], tail: Sequence[str] = ()) -> None:
        self.state = ReaderState.OPEN
        self.rest = ""
        self._calls = calls
        self._header = header
        self._tail = list(tail)
        self._buffer = ""
        self._span: ValueSpan | None = None  # of the arguments, once they have begun
        self._has_arguments = False

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        self._buffer += text
        deltas: list[ParsedDelta] = []
        if self._span is None:
            self._read_header(deltas)
        if self._span is not None and not self._has_arguments:
            self._pass_arguments(self._span, deltas)
        if self._has_arguments:
            self._buffer, is_read = skip_tail(self._buffer, self._tail)
            if is_read:
                self.state, self.rest = ReaderState.DONE, self._buffer
        return deltas

    def flush(self) -> list[ParsedDelta]:
        """Learn that no more text comes."""
        if self._span is None:
            self._fail()
        elif self.state is ReaderState.OPEN:
            self.state = ReaderState.DONE
        return []

    def _fail(self) -> None:
        self.state, self.rest = ReaderState.FAILED, self._buffer

    def _read_header(self, deltas: list[ParsedDelta]) -> None:
        match = self._header.match(self._buffer[:MAX_HEADER_CHARS])
        if match is None:
            if len(self._buffer) >= MAX_HEADER_CHARS:
                self._fail()
            return
        name = next(group for group in match.groups() if group)
        deltas.append(self._calls.start(name.strip()))
        self._buffer = self._buffer[match.end() :]
        self._span = ValueSpan()

    def _pass_arguments(self, span: ValueSpan, deltas: list[ParsedDelta]) -> None:
        end = span.scan(self._buffer)
        piece = self._buffer if end is None else self._buffer[:end]
        self._buffer = self._buffer[len(piece) :]
        self._has_arguments = end is not None
        if piece:
            deltas.append(self._calls.arguments(piece))
