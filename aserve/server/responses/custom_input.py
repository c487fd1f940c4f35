"""The free text of a custom tool in the arguments of the function that stands for it, while they come in.

To the model such a tool is a function of one string, ``{"input": "..."}``; its client wants the string.
"""

import json
import re

import orjson

from aserve.parsing.answer_reader import is_object
from aserve.server.responses.turns import CUSTOM_INPUT

HEAD = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
MAX_HEAD_CHARS = 64
HEX = "[0-9a-fA-F]"
HIGH_SURROGATE = rf"\\u[dD][89abAB]{HEX}{{2}}"
WHOLE = re.compile(  # what can be decoded by itself: no escape is cut, nor a pair of surrogates
    r'(?:[^"\\]++|\\[^u]'
    rf"|{HIGH_SURROGATE}(?:\\u{HEX}{{4}}|(?=[^\\]|\\[^u]))|(?!{HIGH_SURROGATE})\\u{HEX}{{4}})*"
)


class CustomInput:
    """Reads one call. Arguments of another form are the input as they are, at the end."""

    def __init__(self) -> None:
        self.is_over = False  # the string has ended
        self._buffer = ""
        self._is_inside = False
        self._is_foreign = False  # no such head, so nothing is known before the end

    def push(self, arguments: str) -> str:
        """Take more of the arguments; return what is new of the input."""
        if self.is_over:
            return ""
        self._buffer += arguments
        if not self._is_inside and not self._is_foreign:
            self._look_for_head()
        return self._read_string() if self._is_inside else ""

    def is_whole(self, *, has_stopped: bool) -> bool:
        """Whether nothing of the input is missing, before ``flush``; plain text is whole if its writer has stopped."""
        if self._is_inside:
            return self.is_over
        text = self._buffer.lstrip()
        return is_object(text) if text.startswith("{") else has_stopped

    def flush(self) -> str:
        """Return the rest of the input, at the end of the arguments."""
        rest, self._buffer = self._buffer, ""
        if self.is_over:
            return ""
        return decode_string(rest) if self._is_inside else _whole_input(rest)

    def _look_for_head(self) -> None:
        head = HEAD.match(self._buffer)
        if head is not None:
            self._is_inside = True
            self._buffer = self._buffer[head.end() :]
        elif len(self._buffer) > MAX_HEAD_CHARS:
            self._is_foreign = True

    def _read_string(self) -> str:
        whole = WHOLE.match(self._buffer)
        assert whole is not None  # it may be empty
        self._buffer = self._buffer[whole.end() :]
        self.is_over = self._buffer.startswith('"')
        return decode_string(whole[0])


def decode_string(text: str) -> str:
    """Return the text that a JSON string holds; what is not valid in one stays as it is."""
    try:
        decoded: str = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
    return decoded.encode(errors="replace").decode()


def _whole_input(arguments: str) -> str:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    found = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments
