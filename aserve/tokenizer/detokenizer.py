"""Text from token ids as they come: the joined deltas are exactly the decode of all ids at once.

A character whose bytes are spread over tokens is held until it is complete, so no partial character is ever
shown; a U+FFFD that the model really wrote passes like any other character.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from aserve.tokenizer.token_table import TokenTable


class Detokenizer(Protocol):
    """The state of one stream. Ids without a token add nothing."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain now and was not before."""
        ...

    def flush(self) -> str:
        """Return what was held, at the end of the stream."""
        ...


def make_detokenizer(
    table: TokenTable, skip_special_tokens: bool, kept_special_ids: tuple[int, ...] = ()
) -> Detokenizer:
    """Return a detokenizer for one stream over ``table``."""
    texts = table.visible_texts(skip_special_tokens, kept_special_ids)
    return (ByteLevelDetokenizer if table.kind == "byte-level" else SentencePieceDetokenizer)(table, texts)


class ByteLevelDetokenizer:
    """Tokens are bytes; most are whole characters and take the short way through ``texts``."""

    __slots__ = ("_partial", "_pieces", "_texts")

    def __init__(self, table: TokenTable, texts: Sequence[str | None]) -> None:
        self._texts = texts
        self._pieces = table.pieces
        self._partial = b""  # the start of a character, at most three bytes

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain now and was not before."""
        delta = ""
        for token_id in token_ids:
            text = self._texts[token_id] if token_id < len(self._texts) else ""
            if text is None or (self._partial and text):
                data = self._partial + self._pieces[token_id]
                text, num_used = codecs.utf_8_decode(data, "replace", False)
                self._partial = data[num_used:]
            delta += text
        return delta

    def flush(self) -> str:
        """Return U+FFFD for a character that was never completed."""
        partial, self._partial = self._partial, b""
        return partial.decode(errors="replace")


class SentencePieceDetokenizer:
    """Tokens are text, or one byte each of a run that is decoded as a whole.

    A run of byte tokens that is not valid UTF-8 decodes to one U+FFFD per byte, all of it, so a run
    is held until a token that is not a byte ends it.
    """

    __slots__ = ("_num_stripped", "_pieces", "_run", "_texts")

    def __init__(self, table: TokenTable, texts: Sequence[str | None]) -> None:
        self._texts = texts
        self._pieces = table.pieces
        self._run = b""
        self._num_stripped = table.num_stripped  # leading spaces of the whole text still to be dropped

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain now and was not before."""
        delta = ""
        for token_id in token_ids:
            text = self._texts[token_id] if token_id < len(self._texts) else ""
            if text is None:
                self._run += self._pieces[token_id]
            elif text:
                delta += self._end_run() + text if self._run else text
        return self._strip(delta) if self._num_stripped and delta else delta

    def flush(self) -> str:
        """Return the run of bytes at the end."""
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        while self._num_stripped and text:
            if not text.startswith(" "):
                self._num_stripped = 0
                break
            text = text[1:]
            self._num_stripped -= 1
        return text
