"""The model's vocabulary as llguidance needs it: the bytes of each token, and how forced text is cut into tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import orjson
from llguidance import LLTokenizer, TokenizerWrapper

from aserve.errors import ClientError
from aserve.tokenizer.tokenizer import Tokenizer

MAX_CUT_CHARS = 1024  # of forced text, which is cut again for each token; what is further away does not matter yet


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """One entry for each of the model's rows; those without a token are empty and never allowed."""

    pieces: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenBytes":
        """Tabulate ``tokenizer``."""
        return cls(
            tuple(tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)),
            tuple(sorted(tokenizer.special_token_ids)),
            tuple(sorted(tokenizer.eos_token_ids)),
        )

    def dump(self) -> bytes:
        """Return what ``load`` reads."""
        lengths = [len(piece) for piece in self.pieces]
        return orjson.dumps([self.special_ids, self.eos_ids, lengths]) + b"\n" + b"".join(self.pieces)

    @classmethod
    def load(cls, data: bytes) -> "TokenBytes":
        """Return what was dumped."""
        head, _, joined = data.partition(b"\n")
        special_ids, eos_ids, lengths = orjson.loads(head)
        pieces, start = [], 0
        for length in lengths:
            pieces.append(joined[start : start + length])
            start += length
        return cls(tuple(pieces), tuple(special_ids), tuple(eos_ids))


def build_vocabulary(table: TokenBytes, cut: Callable[[str], list[int]] | None = None) -> LLTokenizer:
    """Prepare ``table`` for matching, which takes about half a second; ``cut`` encodes text within an output.

    Raises ClientError if no token ends an output: a grammar could not say that it is complete.
    """
    if not table.eos_ids:
        raise ClientError("structured output needs a model with an end token", param="grammar")
    words = _Words(table, cut)
    vocabulary = LLTokenizer(TokenizerWrapper(words), n_vocab=len(table.pieces), eos_token=list(table.eos_ids))
    words.vocabulary = vocabulary
    return vocabulary


class _Words:
    """What TokenizerWrapper wraps. Where only one text can follow, llguidance allows the token that ``__call__`` says.

    Tokens past the model's rows do not exist for it.
    """

    def __init__(self, table: TokenBytes, cut: Callable[[str], list[int]] | None) -> None:
        self.eos_token_id = table.eos_ids[0]
        self.bos_token_id = None
        self.tokens = list(table.pieces)
        self.special_token_ids = list(table.special_ids)
        self.vocabulary: LLTokenizer | None = None
        self._cut = cut

    def __call__(self, text: str) -> list[int]:
        """Cut ``text`` as the model learned to, or greedily where that would change a byte.

        Returns nothing for what the vocabulary cannot express, which leaves no token to allow.
        """
        if isinstance(text, bytes):
            raise TypeError("TokenizerWrapper asks first whether bytes will do")
        near, far = text[:MAX_CUT_CHARS], text[MAX_CUT_CHARS:]
        token_ids = self._cut(near) if self._cut is not None else []
        if not self._spells(token_ids, near):
            token_ids = self._cut_greedily(near)
        token_ids += self._cut_greedily(far)
        return token_ids if self._spells(token_ids, text) else []

    def _cut_greedily(self, text: str) -> list[int]:
        return self.vocabulary.greedy_tokenize(text) if text and self.vocabulary is not None else []

    def _spells(self, token_ids: list[int], text: str) -> bool:
        size = len(self.tokens)
        return b"".join(self.tokens[i] if i < size else b"" for i in token_ids) == text.encode()
