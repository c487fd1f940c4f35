"""A vocabulary for models without one: bytes, made-up words for all other ids, and one control token.

It gives random weights something to say: any text can be encoded, and any id decodes to printable text of about the
length that tokens of real vocabularies have.
"""

from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from aserve.errors import ConfigError
from aserve.tokenizer.token_table import BYTE_ALPHABET
from aserve.tokenizer.tokenizer import TokenizerSettings

NUM_BYTES = 256
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPACE = next(char for char, byte in BYTE_ALPHABET.items() if byte == ord(" "))


def build_stand_in_tokenizer(config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """Return a tokenizer for the content of a config.json; ids 0 to 255 are bytes.

    The config's end ids keep their role, the last id has it if there is none. Raises ConfigError if the vocabulary is
    too small for the bytes.
    """
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size <= NUM_BYTES:
        raise ConfigError(
            f"random weights without a tokenizer need a vocab_size of more than {NUM_BYTES}, got {vocab_size!r}"
        )
    ends = _end_ids(config, vocab_size)
    words = {_word(token_id): token_id for token_id in range(NUM_BYTES, vocab_size) if token_id != ends[0]}
    vocabulary = BYTE_ALPHABET | words | {END: ends[0]}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    settings = TokenizerSettings(
        vocab_size=vocab_size,
        eos_token_ids=frozenset(ends),
        templates={"default": TEMPLATE},
        template_variables={"eos_token": END},
    )
    return backend, settings


def _end_ids(config: Mapping[str, Any], vocab_size: int) -> list[int]:
    named = config.get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return [i for i in ids if isinstance(i, int) and NUM_BYTES <= i < vocab_size] or [vocab_size - 1]


def _word(token_id: int) -> str:
    """Spell an id with letters as digits, behind a space."""
    letters = ""
    while token_id:
        token_id, digit = divmod(token_id, len(ascii_lowercase))
        letters = ascii_lowercase[digit] + letters
    return SPACE + letters
