"""Markers in text that arrives in pieces: where one is, and what has to wait because it may become one."""

from collections.abc import Sequence

from aserve.parsing.deltas import ParsedDelta, TextDelta

SPACES = " \t\r\n"


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return place and spelling of the first of ``markers`` in ``text``; of two at one place the longer."""
    found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker)) >= 0]
    if not found:
        return None
    place, _, marker = min(found)
    return place, marker


def count_held(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` that is the beginning of a marker, but not a whole one."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) and marker != end for marker in markers):
            return length
    return 0


def skip_tail(text: str, tail: list[str]) -> tuple[str, bool]:
    """Skip white space and the parts of ``tail``, each of which may be missing; take out of it what is dealt with.

    Returns what follows, and whether the tail is dealt with; if not, more text decides.
    """
    while tail:
        text = text.lstrip(SPACES)
        if not text.startswith(tail[0]):
            if tail[0].startswith(text):
                return text, False
        else:
            text = text[len(tail[0]) :]
        tail.pop(0)
    return text, True


class TextGate:
    """Lets text through, but holds ``spaces`` at its end, which belong to a marker if one follows."""

    def __init__(self, spaces: str = SPACES) -> None:
        self._spaces = spaces
        self._held = ""

    def push(self, text: str) -> list[ParsedDelta]:
        """Return what is text for certain."""
        text = self._held + text
        shown = text.rstrip(self._spaces)
        self._held = text[len(shown) :]
        return [TextDelta(shown)] if shown else []

    def drop(self) -> None:
        """Forget what is held: a marker follows."""
        self._held = ""

    def flush(self) -> list[ParsedDelta]:
        """Return what is held."""
        held, self._held = self._held, ""
        return [TextDelta(held)] if held else []
