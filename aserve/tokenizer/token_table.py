"""What each token contributes to decoded text: bytes for a byte-level vocabulary, text or a byte for SentencePiece."""

import json
import re
from collections.abc import Sequence
from typing import Literal

import tokenizers

from aserve.errors import ConfigError

SPACE_MARK = "\u2581"  # how SentencePiece spells a space
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Map each character of the byte-level alphabet to its byte: printable ones to themselves, then 256 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
_TO_LATIN1 = str.maketrans({char: chr(byte) for char, byte in BYTE_ALPHABET.items()})
_BYTE_LEVEL = re.compile(f"[{re.escape(''.join(BYTE_ALPHABET))}]*")


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; one that is not spelled in the alphabet stands for its own text."""
    if _BYTE_LEVEL.fullmatch(token):
        return token.translate(_TO_LATIN1).encode("latin-1")
    return token.encode()


class TokenTable:
    """One row per token id, at least as many as the model has logits.

    ``pieces[id]`` is the token's bytes, empty where no token has that id. In a SentencePiece vocabulary
    ``byte_ids`` are the tokens that stand for one raw byte, and decoding drops up to ``num_stripped`` leading spaces.
    ``texts[id]`` is the token's text where that does not depend on its neighbours, else None;
    ``texts_without_special`` has nothing for special tokens. ``longest_bytes`` is the length of the longest piece.
    """

    def __init__(
        self,
        kind: Literal["byte-level", "sentencepiece"],
        pieces: Sequence[bytes],
        special_ids: frozenset[int],
        byte_ids: frozenset[int] = frozenset(),
        num_stripped: int = 0,
    ) -> None:
        self.kind = kind
        self.pieces = pieces
        self.special_ids = special_ids
        self.num_stripped = num_stripped
        self.texts = [None if token_id in byte_ids else _whole_text(piece) for token_id, piece in enumerate(pieces)]
        self.texts_without_special = ["" if i in special_ids else text for i, text in enumerate(self.texts)]
        self.longest_bytes = max(map(len, pieces))
        self._texts_with: dict[tuple[int, ...], list[str | None]] = {}

    def visible_texts(self, skip_special_tokens: bool, kept_ids: tuple[int, ...] = ()) -> list[str | None]:
        """Return ``texts``, or ``texts_without_special`` with the texts of ``kept_ids``; one server keeps few sets."""
        if not skip_special_tokens:
            return self.texts
        if not kept_ids:
            return self.texts_without_special
        if kept_ids not in self._texts_with:
            texts = list(self.texts_without_special)
            for token_id in kept_ids:
                texts[token_id] = self.texts[token_id]
            self._texts_with[kept_ids] = texts
        return self._texts_with[kept_ids]


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def build_token_table(backend: tokenizers.Tokenizer, vocab_size: int) -> TokenTable:
    """Read the decoder of ``backend`` and tabulate its tokens; raise ConfigError for a decoder of another kind."""
    steps = _decoder_steps(backend)
    added = backend.get_added_tokens_decoder()
    special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
    tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    size = max(vocab_size, max(tokens, default=0) + 1)
    spellings = [tokens.get(token_id, "") for token_id in range(size)]
    kinds = [str(step["type"]) for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenTable("byte-level", [byte_level_bytes(token) for token in spellings], special_ids)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return _sentencepiece_table(spellings, special_ids, steps)
    raise ConfigError(f"the tokenizer decodes with {' + '.join(kinds) or 'nothing'}, which is not supported")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, object]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, object]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _sentencepiece_table(
    spellings: list[str], special_ids: frozenset[int], steps: list[dict[str, object]]
) -> TokenTable:
    if steps[0].get("pattern") != {"String": SPACE_MARK} or steps[0].get("content") != " ":
        raise ConfigError("the tokenizer's decoder replaces something other than spaces, which is not supported")
    strip = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
    if strip["content"] != " " or strip["stop"] or not isinstance(strip["start"], int):
        raise ConfigError("the tokenizer's decoder strips something other than leading spaces, which is not supported")
    pieces, byte_ids = [], set()
    for token_id, spelling in enumerate(spellings):
        if match := BYTE_TOKEN.fullmatch(spelling):
            byte_ids.add(token_id)
            pieces.append(bytes([int(match[1], 16)]))
        else:
            pieces.append(spelling.replace(SPACE_MARK, " ").encode())
    return TokenTable("sentencepiece", pieces, special_ids, frozenset(byte_ids), strip["start"])
