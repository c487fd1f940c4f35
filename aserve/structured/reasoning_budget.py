"""How long one answer may think: after so many tokens of reasoning, the marker that closes it is what comes next."""

import codecs
from collections.abc import Callable

from aserve.structured.answer_rules import AnswerRules, ReasoningMarkers

SPACES = b" \t\r\n"
MAX_SPACES = 64  # in front of reasoning, as the parser has it
HARMONY = ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|>")


class ReasoningBudget:
    """Follows the tokens of one answer. ``forced`` are those that must come next, in order; none: any may.

    The markers do not count. A character that has begun is completed first.
    """

    def __init__(self, rules: AnswerRules, max_tokens: int, encode: Callable[[str], list[int]]) -> None:
        """``encode`` gives the tokens of text within an output."""
        markers = rules.reasoning or HARMONY
        self.forced: list[int] = []
        self._opening = markers.opening.encode()
        self._closing = markers.closing
        self._token_ids = rules.token_ids
        self._encode = encode
        self._num_left = max_tokens
        self._seen = b""  # before reasoning: everything; within it: what may be a part of its closing marker
        self._is_within = markers.is_open
        self._is_over = False

    def follow(self, token_id: int, piece: bytes) -> None:
        """Take the next token, and its bytes."""
        if self.forced:
            self._is_over = len(self.forced) == 1 or token_id != self.forced[0]
            self.forced = [] if self._is_over else self.forced[1:]
        if self._is_over:
            return
        if not self._is_within:
            piece = self._look_for_opening(piece)
        if self._is_within and piece:
            self._count(piece)

    def _look_for_opening(self, piece: bytes) -> bytes:
        """Return what stands behind the opening marker, once it is complete."""
        self._seen += piece
        text = self._seen.lstrip(SPACES)
        if text.startswith(self._opening):
            self._is_within, self._seen = True, b""
            return text[len(self._opening) :]
        self._is_over = not self._opening.startswith(text) or len(self._seen) - len(text) > MAX_SPACES
        return b""

    def _count(self, piece: bytes) -> None:
        closing = self._closing.encode()
        self._seen += piece
        if closing in self._seen:
            self._is_over = True
            return
        self._seen = self._seen[1 - len(closing) :] if len(closing) > 1 else b""
        self._num_left -= 1
        if self._num_left <= 0 and not _is_within_character(self._seen):
            self.forced = self._missing(closing)

    def _missing(self, closing: bytes) -> list[int]:
        """Return the tokens of what is not there yet of the closing marker."""
        if self._closing in self._token_ids:
            return [self._token_ids[self._closing]]
        begun = next((size for size in range(len(closing) - 1, 0, -1) if self._seen.endswith(closing[:size])), 0)
        return self._encode(closing[begun:].decode())


def _is_within_character(text: bytes) -> bool:
    """Whether more bytes belong to the last character of ``text``, of which only the end need be there."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[-3:].lstrip(bytes(range(0x80, 0xC0))))
    return bool(decoder.getstate()[0])
