"""The tokenizer of a model's files."""

from aserve.gguf_header import read_gguf_header
from aserve.model_files import ModelFiles
from aserve.tokenizer.gguf_vocabulary import build_gguf_tokenizer
from aserve.tokenizer.hf_vocabulary import build_hf_tokenizer
from aserve.tokenizer.stand_in import build_stand_in_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Build the tokenizer that belongs to ``files``; raise ConfigError if that is not possible."""
    if files.format == "gguf":
        return Tokenizer(*build_gguf_tokenizer(read_gguf_header(files.path)))
    if files.config is not None and not (files.path / "tokenizer.json").is_file():
        return Tokenizer(*build_stand_in_tokenizer(files.config))
    return Tokenizer(*build_hf_tokenizer(files.path))
