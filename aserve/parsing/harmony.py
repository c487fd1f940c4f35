"""The channels of gpt-oss: each message of an answer has a header that says what it is and whom it is for.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>``
"""

import re

from aserve.parsing.call_reader import CallSequence
from aserve.parsing.deltas import ParsedDelta, ReasoningDelta, TextDelta
from aserve.parsing.markers import MarkerSet
from aserve.parsing.reasoning_meter import ReasoningPlaces

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDINGS = ("<|end|>", "<|call|>", "<|return|>", START)
END_OF_MESSAGE = MarkerSet(ENDINGS)
MARKERS = (*ENDINGS, CHANNEL, MESSAGE, CONSTRAIN)
FUNCTIONS = "functions."
MAX_HEADER_CHARS = 512
SEPARATOR = "\n\n"  # between messages that become one text
RECIPIENT = re.compile(r"to=([^\s<]+)")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """Reads the messages of one answer: analysis is reasoning, what is for a function a call, all else text.

    With ``finds_calls`` false, what is for a function is text. Messages of one kind that follow each other become one
    text with an empty line between. The answer begins in a header; one that does not look like one is text altogether.
    """

    def __init__(self, *, finds_calls: bool) -> None:
        self.places = ReasoningPlaces()
        self._num_chars = 0  # so far; the buffer is the end of them
        self._finds_calls = finds_calls
        self._calls = CallSequence()
        self._buffer = ""
        self._is_first = True
        self._is_header = True
        self._kind: type[TextDelta] | type[ReasoningDelta] | None = TextDelta  # of the message; None: a call
        self._has_text = False
        self._separator = ""

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        self._buffer += text
        self._num_chars += len(text)
        deltas: list[ParsedDelta] = []
        while self._buffer and (self._read_header(deltas) if self._is_header else self._read_message(deltas)):
            pass
        self.places.num_known = self._place
        return deltas

    def flush(self) -> list[ParsedDelta]:
        """Return what was held back."""
        text, self._buffer = self._buffer, ""
        if self._is_header:
            return [TextDelta(text)] if text and self._is_first and not _looks_like_header(text) else []
        deltas: list[ParsedDelta] = []
        self._pass(text, deltas)
        return deltas

    @property
    def _place(self) -> int:
        """Where in the answer the buffer begins."""
        return self._num_chars - len(self._buffer)

    def _read_header(self, deltas: list[ParsedDelta]) -> bool:
        place = self._buffer[:MAX_HEADER_CHARS].find(MESSAGE)
        is_text = self._is_first and not _looks_like_header(self._buffer)
        if is_text or (place < 0 and len(self._buffer) >= MAX_HEADER_CHARS):
            self._begin_message("")
            return True
        if place < 0:
            return False
        header, self._buffer = self._buffer[:place], self._buffer[place + len(MESSAGE) :]
        self._begin_message(header)
        if self._kind is None:
            recipient = RECIPIENT.search(header)
            assert recipient is not None  # it made this message a call
            deltas.append(self._calls.start(recipient[1].removeprefix(FUNCTIONS)))
        return True

    def _begin_message(self, header: str) -> None:
        before = self._kind if self._has_text else None
        self._is_header = self._is_first = self._has_text = False
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        self._kind = TextDelta
        if recipient is not None and recipient[1].startswith(FUNCTIONS):
            self._kind = None if self._finds_calls else TextDelta
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._kind = ReasoningDelta
            self.places.begin(self._place)
        self._separator = SEPARATOR if self._kind is not None and self._kind is before else ""

    def _read_message(self, deltas: list[ParsedDelta]) -> bool:
        text, marker, self._buffer = END_OF_MESSAGE.cut(self._buffer)
        self._pass(text, deltas)
        if not marker:
            return False
        if self._kind is ReasoningDelta:
            self.places.end(self._place - len(marker))
        self._end_message(deltas)
        return True

    def _pass(self, text: str, deltas: list[ParsedDelta]) -> None:
        if not text:
            return
        if self._kind is None:
            deltas.append(self._calls.arguments(text))
        else:
            deltas.append(self._kind(self._separator + text))
            self._separator = ""
        self._has_text = True

    def _end_message(self, deltas: list[ParsedDelta]) -> None:
        if self._kind is None and not self._has_text:
            deltas.append(self._calls.arguments("{}"))
        self._is_header = True


def _looks_like_header(text: str) -> bool:
    """Whether ``text`` is the beginning of a header, as far as it goes."""
    beginning = text.lstrip()
    return any(beginning.startswith(word) or word.startswith(beginning) for word in ("<|", "to=", "assistant"))
