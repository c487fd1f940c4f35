"""The end of a bracketed or quoted value in text that arrives in pieces."""

import re

IN_SCALAR = re.compile(r"[\s,:}\])]")


class ValueSpan:
    """Finds the end of one value, JSON or a Python literal, by its brackets and quotes; does not check the rest."""

    def __init__(self, quotes: str = '"') -> None:
        self._outside = re.compile(f"[{quotes}{{}}()\\[\\]]")
        self._quotes = quotes
        self._quote = ""  # that the string we are in began with
        self._is_escaped = False
        self._is_scalar: bool | None = None  # unknown before the first character
        self._depth = 0

    def scan(self, text: str) -> int | None:
        """Return where in ``text``, the next piece, the value ends, None if it goes on.

        The first piece begins with the value's first character.
        """
        if self._is_scalar is None and text:
            self._is_scalar = text[0] not in "{[(" + self._quotes
        if self._is_scalar:
            delimiter = IN_SCALAR.search(text)
            return delimiter.start() if delimiter else None
        place = 0
        while place < len(text):
            if self._quote:
                place = self._skip_string(text, place)
            else:
                bracket = self._outside.search(text, place)
                if bracket is None:
                    return None
                place = bracket.end()
                self._note(bracket[0])
            if not self._depth and not self._quote:
                return place
        return None

    def _note(self, char: str) -> None:
        if char in self._quotes:
            self._quote = char
        else:
            self._depth += 1 if char in "{[(" else -1

    def _skip_string(self, text: str, place: int) -> int:
        """Return the place behind the string's end, or that of the end of ``text``."""
        while place < len(text):
            char = text[place]
            place += 1
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
                break
        return place
