"""Control tokens in text: found where a prompt or template wrote them, kept out of what people wrote.

Control tokens are the tokens that a vocabulary marks as special, such as ``<|im_end|>``. The tokenizer
itself never looks for them; ``split`` does, over the whole text, so each becomes its single id. Text that
comes from a message is passed through ``mark`` before the template sees it: MARK is put behind the first
character of everything in it that spells a control token, or begins one at the text's end. ``split`` then
cannot see them, and removes the marks. MARK is a lone surrogate, which valid text cannot contain, is
neither a space nor a letter to a template, and so survives trimming, slicing, joining and JSON.

What a template itself spells around message text is the template's own doing; roles, which some
templates put between ``<|`` and ``|>``, are limited to known names (``messages.py``).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aserve.errors import ClientError

MARK = "\ud8ff"
END_MARK = "\ud8fe"  # where the text of a message that is to be continued ends
SPACES = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A special token; ``lstrip`` and ``rstrip`` say that it swallows the white space beside it."""

    token_id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False


class ControlTokens:
    """All control tokens of one vocabulary. Immutable; safe to use from several threads."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        # A token of one character could not be broken up by a mark, so it is ordinary text everywhere.
        self._tokens = {token.text: token for token in tokens if len(token.text) > 1}
        pattern = _trie_pattern(self._tokens)
        self._pattern = re.compile(pattern) if self._tokens else None
        self._first_char = re.compile(f"(?={pattern})(.)", re.DOTALL)  # finds overlapping tokens, too
        self._beginnings = frozenset(text[:end] for text in self._tokens for end in range(1, len(text)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    def split(self, text: str) -> list[str | int]:
        """Cut ``text`` into pieces of ordinary text, without marks, and the ids of control tokens, in order.

        Of two that start at the same place the longer one is taken. Empty pieces are left out.
        """
        parts: list[str | int] = []
        position = 0
        swallow = False
        for match in self._pattern.finditer(text) if self._pattern else ():
            token = self._tokens[match[0]]
            _append_piece(parts, text[position : match.start()], swallow, token.lstrip)
            parts.append(token.token_id)
            position, swallow = match.end(), token.rstrip
        _append_piece(parts, text[position:], swallow, False)
        return parts

    def ids_of(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Return the ids of those ``texts`` that are control tokens."""
        return tuple(self._tokens[text].token_id for text in texts if text in self._tokens)

    def mark(self, text: str) -> str:
        """Return ``text`` so that no control token is found in it, nor at its seam with what follows.

        Raises ClientError for text that is not valid Unicode.
        """
        check_text(text)
        if self._pattern is None:
            return text
        if self._pattern.search(text):
            text = self._first_char.sub(rf"\1{MARK}", text)
        # A mark in the shortest ending that begins a token also breaks up the longer ones.
        for begin in range(len(text) - 1, max(-1, len(text) - 1 - self._longest_beginning), -1):
            if text[begin:] in self._beginnings:
                return text[: begin + 1] + MARK + text[begin + 1 :]
        return text

    def mark_all(self, value: Any) -> Any:
        """Return JSON-like ``value`` with every string in it marked, keys too."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
            return {self.mark_all(key): self.mark_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_all(item) for item in value]
        return value


def unmark(text: str) -> str:
    """Return ``text`` as it was before ``mark``."""
    return text.replace(MARK, "")


def unmark_all(value: Any) -> Any:
    """Undo ``mark_all``."""
    if isinstance(value, str):
        return unmark(value)
    if isinstance(value, Mapping):
        return {unmark_all(key): unmark_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [unmark_all(item) for item in value]
    return value


def check_text(text: str) -> None:
    """Raise ClientError for lone surrogates, which no encoding of text can carry."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ClientError("text is not valid Unicode: it holds a lone surrogate") from None


def _append_piece(parts: list[str | int], piece: str, strip_left: bool, strip_right: bool) -> None:
    if MARK in piece:
        piece = piece.replace(MARK, "")
    if strip_left:
        piece = piece.lstrip(SPACES)
    if strip_right:
        piece = piece.rstrip(SPACES)
    if piece:
        parts.append(piece)


def _trie_pattern(texts: Iterable[str]) -> str:
    """Return a regular expression for any of ``texts``, the longest first, that reads each character once.

    A plain alternation would try hundreds of reserved tokens at every ``<`` of a hostile text.
    """
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}  # a token may end here
    return _node_pattern(trie)


def _node_pattern(node: dict[str, Any]) -> str:
    branches = [re.escape(char) + _node_pattern(following) for char, following in node.items() if char]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"
