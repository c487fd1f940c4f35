"""A tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

Unknown kinds are refused by name: text that is cut otherwise than the model was trained on gives other
ids, and nothing would say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from aserve.errors import ConfigError, WeightsError
from aserve.gguf_header import GgufHeader
from aserve.tokenizer.token_table import SPACE_MARK
from aserve.tokenizer.tokenizer import TokenizerSettings

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a byte-level vocabulary cuts text before merging; as in the models' own tokenizer.json.

    Without a ``pattern`` it is GPT-2's, which the library has built in.
    """

    pattern: str | None = None
    single_digits: bool = False
    composes: bool = False  # normalises to NFC
    ignores_merges: bool = False  # a word that is a token is taken whole
    adds_bos: bool = False  # where the file does not say


GPT2 = Cutting()
LLAMA3 = Cutting(pattern=_WORDS.replace("DIGITS", "{1,3}"), ignores_merges=True, adds_bos=True)

# tokenizer.ggml.pre -> how it cuts
CUTTINGS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": Cutting(single_digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": Cutting(pattern=_WORDS.replace("DIGITS", ""), composes=True),
}


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``, as llama.cpp numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_gguf_tokenizer(header: GgufHeader) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """Return the tokenizer and settings that the file describes.

    Raises ConfigError for a kind that is not supported, WeightsError for metadata that is missing or inconsistent.
    """
    vocabulary = _Vocabulary(header)
    build = {"gpt2": vocabulary.build_byte_level, "llama": vocabulary.build_sentencepiece}.get(vocabulary.model)
    if build is None:
        raise ConfigError(f"the GGUF file's tokenizer model is {vocabulary.model!r}; supported: gpt2, llama")
    try:
        backend = build()
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # the library raises nothing narrower, for merges of unknown tokens, say
        raise WeightsError(f"the GGUF file's vocabulary is damaged: {error}") from error
    vocabulary.add_marked_tokens(backend)
    return backend, vocabulary.read_settings()


class _Vocabulary:
    """The file's token list and the metadata about it."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.model = self._get("model")
        self._tokens: list[str] = self._get_list("tokens")
        self._types: list[int] = self._get("token_type") or [TokenType.NORMAL] * len(self._tokens)
        if len(self._types) != len(self._tokens):
            raise WeightsError("the GGUF file's tokenizer.ggml.token_type does not fit its tokens")
        # Rows that only pad the embedding are no tokens.
        self._ids = {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind != TokenType.UNUSED
        }

    def _get(self, key: str) -> Any:
        return self._header.metadata.get(f"tokenizer.ggml.{key}")

    def _get_list(self, key: str) -> list[Any]:
        values = self._get(key)
        if not isinstance(values, list) or not values:
            raise WeightsError(f"the GGUF file has no tokenizer.ggml.{key}")
        return values

    def _get_id(self, name: str) -> int | None:
        token_id = self._get(f"{name}_token_id")
        return token_id if isinstance(token_id, int) and 0 <= token_id < len(self._tokens) else None

    @property
    def _cutting(self) -> Cutting:
        name = self._get("pre") or "default"
        if name not in CUTTINGS:
            raise ConfigError(f"the GGUF file's pre-tokenizer is {name!r}; supported: {', '.join(CUTTINGS)}")
        return CUTTINGS[name]

    def build_byte_level(self) -> tokenizers.Tokenizer:
        cutting = self._cutting
        merges = [tuple(merge.split(" ")) for merge in self._get_list("merges")]
        backend = tokenizers.Tokenizer(models.BPE(self._ids, merges, ignore_merges=cutting.ignores_merges))
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cutting.pattern is None)]
        if cutting.pattern is not None:
            steps.insert(0, pre_tokenizers.Split(Regex(cutting.pattern), "isolated"))
        if cutting.single_digits:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if cutting.composes:
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        return backend

    def build_sentencepiece(self) -> tokenizers.Tokenizer:
        unknown_id = self._get_id("unknown")
        backend = tokenizers.Tokenizer(
            models.BPE(
                self._ids,
                self._derive_merges(),
                unk_token=None if unknown_id is None else self._tokens[unknown_id],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        has_prefix = self._get("add_space_prefix") is not False
        to_marks = normalizers.Replace(" ", SPACE_MARK)
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE_MARK), to_marks] if has_prefix else [to_marks]
        )
        steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
        return backend

    def _derive_merges(self) -> list[tuple[str, str]]:
        """Recover the merges from the scores: the pair whose joined token scores highest is merged first.

        Only ordinary tokens take part, so that no text can merge into a control token.
        """
        scores = dict(zip(self._tokens, self._get_list("scores"), strict=True))
        ordinary = {token for token, token_id in self._ids.items() if self._types[token_id] == TokenType.NORMAL}
        merges = [
            (token[:cut], token[cut:])
            for token in ordinary
            for cut in range(1, len(token))
            if token[:cut] in ordinary and token[cut:] in ordinary
        ]
        merges.sort(key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0]), pair))
        return merges

    def add_marked_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Make control tokens special, and have user-defined ones found whole in text."""
        named = {self._get_id(name) for name in ("bos", "eos", "eot", "eom", "unknown")}
        special, plain = [], []
        for token, token_id in self._ids.items():
            kind = self._types[token_id]
            if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in named:
                special.append(AddedToken(token, normalized=False, special=True))
            elif kind == TokenType.USER_DEFINED:
                plain.append(AddedToken(token, normalized=False, special=False))
        backend.add_special_tokens(special)
        backend.add_tokens(plain)

    def read_settings(self) -> TokenizerSettings:
        bos, eos = self._get_id("bos"), self._get_id("eos")
        names = {"bos_token": bos, "eos_token": eos, "unk_token": self._get_id("unknown")}
        names["pad_token"] = self._get_id("padding")
        ends = {eos, self._get_id("eot"), self._get_id("eom")} - {None}
        embedding = self._header.tensors.get("token_embd.weight")
        return TokenizerSettings(
            vocab_size=embedding.shape[0] if embedding else len(self._tokens),
            bos_token_id=bos,
            eos_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
            prefix_ids=(bos,) if bos is not None and self._adds_bos else (),
            suffix_ids=(eos,) if eos is not None and self._get("add_eos_token") else (),
            templates=_read_templates(self._header.metadata),
            template_variables={name: self._tokens[i] for name, i in names.items() if i is not None},
        )

    @property
    def _adds_bos(self) -> bool:
        flag = self._get("add_bos_token")
        if flag is None:
            return self.model == "llama" or self._cutting.adds_bos
        return bool(flag)


def _read_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; the one without a name comes first, as ``default``."""
    prefix = "tokenizer.chat_template"
    templates = {"default": metadata[prefix]} if prefix in metadata else {}
    return templates | {key[len(prefix) + 1 :]: text for key, text in metadata.items() if key.startswith(f"{prefix}.")}
