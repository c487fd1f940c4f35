"""The vocabulary of models that have none."""

import pytest

from aserve.errors import ConfigError
from aserve.tokenizer.stand_in import END, build_stand_in_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer

CONFIG = {"vocab_size": 151936, "eos_token_id": [151645, 151643]}
END_ID = 151645


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(*build_stand_in_tokenizer(CONFIG))


@pytest.mark.parametrize("text", ["", "hello world", "  two\n\tlines \n", "naïve 日本 🙂", "\x00\x7f"])
def test_text_becomes_its_bytes_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_other_id_decodes_to_a_short_word_of_its_own(tokenizer: Tokenizer) -> None:
    others = [token_id for token_id in range(256, CONFIG["vocab_size"]) if token_id != END_ID]  # type: ignore[call-overload]
    words = [tokenizer.token_bytes(token_id).decode() for token_id in others]
    assert len(set(words)) == len(words)
    assert all(word[0] == " " and word[1:].isalpha() and len(word) <= 5 for word in words)
    sample = [300, 151935, 40000]
    assert tokenizer.decode(sample) == "".join(words[others.index(token_id)] for token_id in sample)


def test_a_stream_says_what_decoding_the_whole_says(tokenizer: Tokenizer) -> None:
    ids = [*"日本".encode(), 5000, END_ID, 0xFF, 6000]
    stream = tokenizer.detokenizer()
    assert "".join(stream.push([token_id]) for token_id in ids) + stream.flush() == tokenizer.decode(ids)


def test_the_ends_are_those_of_the_config(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == {151645, 151643}
    assert tokenizer.special_token_ids == {END_ID}
    assert tokenizer.encode(f"a{END}b") == [97, END_ID, 98]
    assert tokenizer.decode([97, END_ID, 98]) == "ab"


@pytest.mark.parametrize("eos", [None, 5, 400, "x"])
def test_without_a_usable_end_the_last_id_is_one(eos: object) -> None:
    tokenizer = Tokenizer(*build_stand_in_tokenizer({"vocab_size": 300, "eos_token_id": eos}))
    assert tokenizer.eos_token_ids == {299}


def test_chats_are_rendered(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": f"hi {END}"}]
    ids = tokenizer.encode_chat(messages)
    assert ids.count(END_ID) == 2  # that of the text stays text
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"system: be{END}user: hi {END}{END}assistant: "


@pytest.mark.parametrize("size", [256, None, "300"])
def test_a_vocabulary_without_room_for_the_bytes_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="vocab_size of more than 256, got"):
        build_stand_in_tokenizer({"vocab_size": size})
