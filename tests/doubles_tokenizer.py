# ruff: noqa: RUF001 - the samples are full of look-alike characters on purpose
"""Plain reference implementations of the two kinds of BPE, and writers for small vocabularies.

The references follow the published algorithms with no attention to speed, and share no code with aserve.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import regex
import tokenizers

from aserve.model_files import ModelFiles
from aserve.tokenizer.load import load_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer

GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# As llama.cpp (src/llama-vocab.cpp) lists them for each tokenizer.ggml.pre; applied one after the other.
REFERENCE_CUTS = {
    "gpt-2": [GPT2_CUT],
    "default": [GPT2_CUT],
    "smollm": [r"\p{N}", GPT2_CUT],
    "llama-bpe": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}


def byte_spelling() -> dict[int, str]:
    """Spell each byte as GPT-2's encoder does."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelling, following = {}, 256
    for byte in range(256):
        spelling[byte] = chr(byte) if byte in kept else chr(following)
        following += byte not in kept
    return spelling


class ReferenceBpe:
    """Byte-level BPE: cut, spell bytes, then merge the pair of lowest rank until none is left."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], cut: str) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._cuts = [regex.compile(pattern) for pattern in REFERENCE_CUTS[cut]]
        self._composes = cut == "qwen2"  # in the model's tokenizer.json, not in llama.cpp
        self._takes_words_whole = cut == "llama-bpe"
        self._spelling = byte_spelling()
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        words = [unicodedata.normalize("NFC", text) if self._composes else text]
        for pattern in self._cuts:
            words = [piece for word in words for piece in _isolate(pattern, word)]
        return [token_id for word in words for token_id in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        if word not in self._known:
            self._known[word] = self._merge("".join(self._spelling[byte] for byte in word.encode()))
        return self._known[word]

    def _merge(self, spelled: str) -> list[int]:
        if self._takes_words_whole and spelled in self._ids:
            return [self._ids[spelled]]
        parts = [char for char in spelled if char in self._ids]
        while True:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(parts)]
            if not ranks or min(ranks) == len(self._ranks):
                return [self._ids[part] for part in parts]
            at = ranks.index(min(ranks))
            parts[at : at + 2] = ["".join(parts[at : at + 2])]


def _isolate(pattern: "regex.Pattern[str]", text: str) -> list[str]:
    """Cut ``text`` into the matches and what lies between them."""
    pieces, position = [], 0
    for match in pattern.finditer(text):
        pieces += [text[position : match.start()], match[0]]
        position = match.end()
    return [piece for piece in [*pieces, text[position:]] if piece]


class ReferenceSentencePiece:
    """SentencePiece BPE: join the neighbours whose joined piece scores highest, the leftmost of equals."""

    def __init__(self, scores: Mapping[str, float], ids: Mapping[str, int], has_prefix: bool) -> None:
        self._scores = scores
        self._ids = ids
        self._has_prefix = has_prefix

    def encode(self, text: str) -> list[int]:
        if not text:
            return []
        parts = list((" " if self._has_prefix else "") + text)
        parts = [part.replace(" ", "\u2581") for part in parts]
        while True:
            joined = [left + right for left, right in pairwise(parts)]
            scores = [self._scores.get(piece, -np.inf) for piece in joined]
            if not scores or max(scores) == -np.inf:
                break
            at = scores.index(max(scores))
            parts[at : at + 2] = [joined[at]]
        ids = []
        for part in parts:
            ids += [self._ids[part]] if part in self._ids else [self._ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        return ids


def write_gguf(path: Path, metadata: Mapping[str, Any], num_rows: int | None = None) -> Path:
    """Write a GGUF with ``tokenizer.*`` metadata and, if ``num_rows`` is given, an embedding of so many rows."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    if num_rows is not None:
        writer.add_tensor("token_embd.weight", np.zeros((num_rows, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_gguf(path: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles(path, "gguf", path.stem))


def train_pieces(corpus: Sequence[str], size: int) -> list[str]:
    """Learn SentencePiece-like pieces from ``corpus``, the earliest merged first, single characters last."""
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    learner.train_from_iterator(corpus, tokenizers.trainers.BpeTrainer(vocab_size=size, show_progress=False))
    pieces = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    return [piece for piece, _ in pieces if len(piece) > 1] + [piece for piece, _ in pieces if len(piece) == 1]


def sentencepiece_metadata(pieces: Sequence[str]) -> dict[str, Any]:
    """Lay out a "llama" vocabulary as converted files have it: <unk>, <s>, </s>, 256 bytes, then the pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def make_tokenizer_with_bos(folder: Path, template: str | None) -> Tokenizer:
    """Return a tokenizer that adds BOS (1) to raw prompts, with the chat template ``template``."""
    pieces = train_pieces([sample.replace("\u2581", " ") for sample in SAMPLES], 700)
    extra = {} if template is None else {"tokenizer.chat_template": template}
    return load_gguf(write_gguf(folder / "bos.gguf", sentencepiece_metadata(pieces) | extra))


def make_tokenizer_with_markers(folder: Path, template: str, markers: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of bytes, " t", the end token 257 and ``markers``, which are control tokens."""
    tokens = [*byte_spelling().values(), "Ġt", "<|endoftext|>", *markers]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3] * (len(tokens) - 257),
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": template,
    }
    return load_gguf(write_gguf(folder / "markers.gguf", metadata))


SAMPLES = [
    "The quick brown fox jumps over the lazy dog. It's 3 o'clock; we'll see 1,234.56 things they'd NEVER'VE known!",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Größe, naïve façade, señor, smørrebrød, Ελληνικά, Русский язык.",
    "中文字符测试，全角标点。日本語のテキスト、カタカナ。한국어 문장입니다. ภาษาไทยไม่มีช่องว่าง हिन्दी में लिखा हुआ বাংলা தமிழ்",
    "שלום עולם مرحبا بالعالم فارسی ქართული հայերեն አማርኛ ᏣᎳᎩ",
    "😀😃👨‍👩‍👧‍👦🏳️‍🌈🇨🇿 e\u0301 vs \u00e9, ﬁ, ①②③, ½, Ⅷ, ٣٤٥, x²y³, \u200b\u200d\ufeff\ufffd, 𝕌𝕟𝕚𝕔𝕠𝕕𝕖",
    "def f(x):\n\tif x > 0:\n\t\treturn {'a': [1, 2, 3]}  # comment\n\n\n    while True:\r\n        pass\r\n",
    "   leading and trailing   \n\n \t mixed \u00a0 nbsp \u3000 wide\n   \n",
    "<|im_sta rt|> <|endoftext <0x0A> </s <s\u2581under_score __init__ C++ a.b/c?d=e&f=%20 $100 100% #hash @at ~tilde",
    "1234567890 12 345 6789 0.1 1e-5 0xFF 1_000 ２３",
    "",
    " ",
    "\n",
    "a",
]
