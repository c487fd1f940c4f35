"""Text whose token ids are known, so that the next turn of a conversation is not tokenized again.

A prompt that continues a conversation begins with text the model has seen or written. Tokenized again it may
come out differently than the model wrote it; then neither the ids nor the KV pages of the turn before can be used.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a prompt: its token ids, and its text as length and digest."""

    num_chars: int
    digest: str
    token_ids: tuple[int, ...]


def make_span(text: str, token_ids: Sequence[int]) -> Span:
    """Return the span of ``text``, marks of control tokens included, with its ids."""
    return Span(len(text), _digest(text), tuple(token_ids))


def match_spans(text: str, spans: Sequence[Span]) -> tuple[list[Span], int]:
    """Return those of ``spans`` that ``text`` begins with, one behind the other, and where the last one ends."""
    end = 0
    matched: list[Span] = []
    for span in spans:
        piece = text[end : end + span.num_chars]
        if len(piece) != span.num_chars or _digest(piece) != span.digest:
            break
        matched.append(span)
        end += span.num_chars
    return matched, end


def join_spans(spans: Sequence[Span]) -> list[int]:
    """Return the token ids of ``spans`` in a row."""
    return [token_id for span in spans for token_id in span.token_ids]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
