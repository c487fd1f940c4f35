"""Markers in text that arrives in pieces: where one is, and what has to wait because it may become one."""

import re
from collections.abc import Sequence

from aserve.parsing.deltas import ParsedDelta, TextDelta

SPACES = " \t\r\n"


class MarkerSet:
    """Markers of one kind, made ready to be looked for in every piece of every answer."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = sorted(markers, key=len, reverse=True)  # of two at one place the longer is found
        self._pattern = re.compile("|".join(map(re.escape, self._markers)))
        self._begins = re.compile(f"[{''.join(re.escape(marker[0]) for marker in self._markers)}]")

    def may_begin_in(self, text: str) -> bool:
        """Whether there is a marker in ``text``, or something that may become one."""
        return self._begins.search(text) is not None

    def cut(self, text: str) -> tuple[str, str, str]:
        """Return what stands before the first marker, the marker, and what follows it.

        If there is none, return what is certainly not part of one, nothing, and the end that may become one.
        """
        if not self.may_begin_in(text):  # nearly every piece
            return text, "", ""
        if found := self._pattern.search(text):
            return text[: found.start()], found[0], text[found.end() :]
        for begin in self._begins.finditer(text, max(0, len(text) - len(self._markers[0]) + 1)):
            end = text[begin.start() :]
            if any(marker.startswith(end) for marker in self._markers):
                return text[: begin.start()], "", end
        return text, "", ""


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
        self._held: list[str] = []

    def push(self, text: str) -> list[ParsedDelta]:
        """Return what is text for certain."""
        shown = text.rstrip(self._spaces)
        if not shown:
            if text:
                self._held.append(text)
            return []
        delta = TextDelta("".join([*self._held, shown]) if self._held else shown)
        self._held = [text[len(shown) :]] if len(shown) < len(text) else []
        return [delta]

    def drop(self) -> None:
        """Forget what is held: a marker follows."""
        self._held = []

    def flush(self) -> list[ParsedDelta]:
        """Return what is held."""
        held, self._held = "".join(self._held), []
        return [TextDelta(held)] if held else []
