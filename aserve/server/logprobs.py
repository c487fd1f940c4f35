"""Log probabilities in the two shapes of the OpenAI API.

``bytes`` come from the vocabulary, never from decoded text, so that the bytes of a character that is split over several
tokens are its own. Minus infinity is shown as a finite number, for JSON has no other.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from aserve.request import LOWEST_LOGPROB, TokenLogprobs
from aserve.tokenizer.tokenizer import Tokenizer


def finite(logprob: float) -> float:
    """Return ``logprob``, or LOWEST_LOGPROB if it is smaller or not a number."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


class TokenNames:
    """How tokens are shown to people and programs."""

    def __init__(self, tokenizer: Tokenizer, *, hides_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hides_special = hides_special

    def visible_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that the token adds to the text, None for a control token that is left out of it."""
        if self._hides_special and token_id in self._tokenizer.special_token_ids:
            return None
        return self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int, prefix: str = "") -> str:
        r"""Return the token as text; bytes that are not UTF-8 by themselves as ``\xf0\x9f`` after ``prefix``."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(entries: Iterable[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat choice or chunk."""
    return {
        "content": [
            {
                **_chat_entry(entry.token_id, entry.logprob, names),
                "top_logprobs": [_chat_entry(token_id, logprob, names) for token_id, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    raw = names.visible_bytes(token_id)
    return {
        "token": names.name(token_id),
        "logprob": finite(logprob),
        "bytes": None if raw is None else list(raw),
    }


class CompletionLogprobs:
    """Builds the ``logprobs`` objects of one completion; keeps the place in the text from one to the next."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._names = TokenNames(tokenizer, hides_special=skip_special_tokens)
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens)
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Return the object for an echoed prompt; its first token has no log probability."""
        return self._render(list(zip(token_ids, entries, strict=True)))

    def output(self, entries: Iterable[TokenLogprobs]) -> dict[str, list[Any]]:
        """Return the object for the next output tokens."""
        return self._render([(entry.token_id, entry) for entry in entries])

    def _render(self, pairs: list[tuple[int, TokenLogprobs | None]]) -> dict[str, list[Any]]:
        return {
            "tokens": [self._name(token_id) for token_id, _ in pairs],
            "token_logprobs": [entry and finite(entry.logprob) for _, entry in pairs],
            "top_logprobs": [entry and self._alternatives(entry) for _, entry in pairs],
            "text_offset": [self._advance(token_id) for token_id, _ in pairs],
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the chosen one; of tokens with one name the likelier stays."""
        shown: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            shown.setdefault(self._name(token_id), finite(logprob))
        return shown

    def _name(self, token_id: int) -> str:
        return self._names.name(token_id, prefix="bytes:")

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._detokenizer.push([token_id]))
        return offset


def join_completion_logprobs(parts: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Append the objects of a completion to one another."""
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part.items():
            joined[name].extend(values)
    return joined
