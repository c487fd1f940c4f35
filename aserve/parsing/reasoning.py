"""Reasoning between two markers at the beginning of an answer, as in ``<think>...</think>``."""

from aserve.parsing.deltas import ParsedDelta, ReasoningDelta, TextDelta
from aserve.parsing.markers import SPACES, MarkerSet, TextGate
from aserve.parsing.reasoning_meter import ReasoningPlaces

MAX_SPACES = 64  # in front of reasoning; an answer that begins with more has none


class TaggedReasoning:
    """Splits an answer into reasoning and text; white space beside the markers belongs to neither.

    ``is_open`` says that the prompt has the opening marker already.
    """

    def __init__(self, opening: str, closing: str, *, is_open: bool) -> None:
        self.places = ReasoningPlaces(is_open=is_open)
        self._opening = opening
        self._closing = MarkerSet((closing,))
        self._num_chars = 0  # so far; the buffer is the end of them
        self._buffer = ""
        self._is_undecided = not is_open
        self._is_reasoning = is_open
        self._is_behind_marker = is_open
        self._gate = TextGate()

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        self._buffer += text
        self._num_chars += len(text)
        deltas = self._read()
        self.places.num_known = self._place
        return deltas

    def flush(self) -> list[ParsedDelta]:
        """Return what was held back."""
        text, self._buffer = self._buffer, ""
        if not self._is_reasoning:
            return [TextDelta(text)] if text and not self._is_behind_marker else []
        return _as_reasoning([*self._gate.push(text), *self._gate.flush()])

    @property
    def _place(self) -> int:
        """Where in the answer the buffer begins."""
        return self._num_chars - len(self._buffer)

    def _read(self) -> list[ParsedDelta]:
        if self._is_undecided:
            self._look_for_opening()
        if self._is_undecided:
            return []
        deltas: list[ParsedDelta] = []
        if self._is_reasoning:
            deltas += self._read_reasoning()
        if not self._is_reasoning:
            deltas += self._read_text()
        return deltas

    def _look_for_opening(self) -> None:
        beginning = self._buffer.lstrip(SPACES)
        if len(self._buffer) - len(beginning) > MAX_SPACES:
            self._is_undecided = False
        elif beginning.startswith(self._opening):
            self._buffer = beginning[len(self._opening) :]
            self.places.begin(self._place)
            self._is_reasoning = self._is_behind_marker = True
            self._is_undecided = False
        elif not self._opening.startswith(beginning):
            self._is_undecided = False

    def _strip_behind_marker(self) -> None:
        if self._is_behind_marker:
            self._buffer = self._buffer.lstrip(SPACES)
            self._is_behind_marker = not self._buffer

    def _read_reasoning(self) -> list[ParsedDelta]:
        self._strip_behind_marker()
        shown, marker, self._buffer = self._closing.cut(self._buffer)
        if not marker:
            return _as_reasoning(self._gate.push(shown))
        self.places.end(self._place - len(marker))
        self._is_reasoning = False
        self._is_behind_marker = True
        deltas = _as_reasoning(self._gate.push(shown))
        self._gate.drop()
        return deltas

    def _read_text(self) -> list[ParsedDelta]:
        self._strip_behind_marker()
        text, self._buffer = self._buffer, ""
        return [TextDelta(text)] if text else []


def _as_reasoning(deltas: list[ParsedDelta]) -> list[ParsedDelta]:
    return [ReasoningDelta(delta.text) for delta in deltas if isinstance(delta, TextDelta)]
