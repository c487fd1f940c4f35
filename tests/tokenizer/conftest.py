"""Fixtures of the tokenizer tests."""

import pytest
from doubles_tokenizer import SAMPLES, load_gguf, sentencepiece_metadata, train_pieces, write_gguf

from aserve.model_files import ModelFiles
from aserve.tokenizer.load import load_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_tokenizer(demo_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(demo_files)


@pytest.fixture(scope="session")
def sentencepiece_pieces() -> list[str]:
    return train_pieces([sample.replace("\u2581", " ") for sample in SAMPLES], 700)


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_pieces: list[str], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("sentencepiece") / "small.gguf"
    return load_gguf(write_gguf(path, sentencepiece_metadata(sentencepiece_pieces)))
