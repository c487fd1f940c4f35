"""Encoding as all endpoints use it: BOS, limits, threads."""

import json
import subprocess
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest
from doubles_tokenizer import SAMPLES, byte_spelling, load_gguf, sentencepiece_metadata, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.errors import ClientError
from aserve.tokenizer.tokenizer import MAX_COMPOSED, Tokenizer

WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.fixture(scope="module")
def bos_tokenizer(sentencepiece_pieces: list[str], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that adds BOS to raw prompts, and a template that prints it."""
    metadata = sentencepiece_metadata(sentencepiece_pieces) | {"tokenizer.chat_template": WITH_BOS}
    return load_gguf(write_gguf(tmp_path_factory.mktemp("bos") / "m.gguf", metadata))


def test_one_bos_everywhere(bos_tokenizer: Tokenizer) -> None:
    assert bos_tokenizer.encode_chat([{"role": "user", "content": "hi"}]).count(1) == 1
    assert bos_tokenizer.encode("hi").count(1) == 1
    assert bos_tokenizer.encode("<s>hi").count(1) == 1
    assert bos_tokenizer.encode("hi", add_special_tokens=False).count(1) == 0
    assert bos_tokenizer.encode("") == [1]


def test_a_template_without_bos_gets_none(sentencepiece_pieces: list[str], tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(sentencepiece_pieces) | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", metadata))
    assert 1 not in tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_without_a_template_only_chats_are_refused(sentencepiece_tokenizer: Tokenizer) -> None:
    assert not sentencepiece_tokenizer.has_chat_template
    assert sentencepiece_tokenizer.encode("hi")
    with pytest.raises(ClientError, match="no chat template"):
        sentencepiece_tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_raw_prompts_may_spell_control_tokens(demo_tokenizer: Tokenizer) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    assert demo_tokenizer.encode(prompt) == [1, 4093, 198, 6004, 2, 198]


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b", "\udfff" * 3])
def test_text_that_is_not_unicode_is_refused(demo_tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(ClientError, match="not valid Unicode"):
        demo_tokenizer.encode(text)
    with pytest.raises(ClientError, match="not valid Unicode"):
        demo_tokenizer.encode_chat([{"role": "user", "content": text}])


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_the_lower_bound_is_one(demo_tokenizer: Tokenizer, text: str) -> None:
    missing = sum(char in "\x04\x06\x13\x14\x16\x1d" for char in text)  # cost no token with this model
    assert demo_tokenizer.min_tokens_for(len(text) - missing) <= len(demo_tokenizer.encode(text))


def test_the_lower_bound_is_tight_for_the_longest_token(demo_tokenizer: Tokenizer) -> None:
    longest = "\n" + " " * 80
    assert len(demo_tokenizer.encode(longest * 10)) == demo_tokenizer.min_tokens_for(len(longest * 10)) == 10
    assert demo_tokenizer.min_tokens_for(0) == 0


def test_the_lower_bound_allows_for_composition(tmp_path: Path) -> None:
    # u + two marks is one character of two bytes after NFC
    first, second = (byte_spelling()[byte] for byte in "\u01d6".encode())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [first + second, first, second],
        "tokenizer.ggml.merges": [f"{first} {second}"],
    }
    tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", metadata))
    assert tokenizer.encode("u\u0308\u0304") == [0]
    assert tokenizer.min_tokens_for(3) == 1


def test_no_characters_compose_into_fewer_bytes_than_the_bound_allows() -> None:
    for code in range(sys.maxunicode + 1):
        spread = unicodedata.normalize("NFD", chr(code))
        if not 0xD800 <= code < 0xE000:
            assert len(spread) <= MAX_COMPOSED * len(unicodedata.normalize("NFC", spread).encode())


def test_a_chat_of_many_parts(demo_tokenizer: Tokenizer) -> None:
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    first, both = (demo_tokenizer.encode_chat(turns[:n], add_generation_prompt=False) for n in (1, 2))
    many = demo_tokenizer.encode_chat([turns[0], *[turns[1]] * 2000], add_generation_prompt=False)
    assert many == first + both[len(first) :] * 2000


@pytest.mark.alone
def test_prompts_that_are_certainly_too_long_are_refused_before_the_work(demo_tokenizer: Tokenizer) -> None:
    huge = "word " * 1_000_000
    start = time.perf_counter()
    for call in (
        lambda: demo_tokenizer.encode(huge, max_tokens=8192),
        lambda: demo_tokenizer.encode_chat([{"role": "user", "content": huge}], max_tokens=8192),
        lambda: demo_tokenizer.encode_chat([{"role": "user", "content": "x"}] * 200_000, max_tokens=8192),
    ):
        with pytest.raises(ClientError, match="at least") as caught:
            call()
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param in ("prompt", "messages")
    assert time.perf_counter() - start < 0.5  # encoding it takes seconds


def test_the_exact_limit(demo_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert len(demo_tokenizer.encode_chat(messages, max_tokens=31)) == 31
    with pytest.raises(ClientError, match="31 tokens > 30 maximum") as caught:
        demo_tokenizer.encode_chat(messages, max_tokens=30)
    assert caught.value.code == "context_length_exceeded"
    assert demo_tokenizer.encode("hi", max_tokens=1) == [6004]
    with pytest.raises(ClientError, match="2 tokens > 1 maximum"):
        demo_tokenizer.encode("hi hi", max_tokens=1)


def test_a_template_that_makes_the_text_too_long(sentencepiece_pieces: list[str], tmp_path: Path) -> None:
    source = "{% for n in range(9999) %}{{ messages[0].content }}{% endfor %}"
    metadata = sentencepiece_metadata(sentencepiece_pieces) | {"tokenizer.chat_template": source}
    tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", metadata))
    with pytest.raises(ClientError) as caught:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}], max_tokens=100)
    assert caught.value.code == "context_length_exceeded"


def test_tokens_without_an_embedding_row_are_refused(sentencepiece_pieces: list[str], tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(sentencepiece_pieces)
    tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", metadata, num_rows=300))
    assert (tokenizer.vocab_size, tokenizer.num_tokens) == (300, 259 + len(sentencepiece_pieces))
    with pytest.raises(ClientError, match="no embedding for the token"):
        tokenizer.encode("the")
    assert tokenizer.encode("<s>", add_special_tokens=False) == [1]


def test_many_threads_at_once(demo_tokenizer: Tokenizer) -> None:
    texts = [f"{sample} <|im_end|> {number}" for number in range(20) for sample in SAMPLES]

    def work(text: str) -> tuple[list[int], list[int], str]:
        chat = demo_tokenizer.encode_chat([{"role": "user", "content": text}])
        ids = demo_tokenizer.encode(text)
        return chat, ids, demo_tokenizer.decode(ids)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, texts)) == [work(text) for text in texts]


@pytest.mark.alone
def test_encoding_a_long_text_lets_other_threads_run(demo_tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 40_000
    gaps: list[float] = []
    done = Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.wait(0.002):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    demo_tokenizer.encode(text)
    elapsed = time.perf_counter() - start
    done.set()
    watcher.join()
    assert max(gaps) < max(0.5 * elapsed, 0.1)


LOAD_AND_LIST_MODULES = """
import json, sys
from aserve.demo_model import find_demo_model
from aserve.tokenizer.load import load_tokenizer
load_tokenizer(find_demo_model()).encode_chat([{"role": "user", "content": "hi"}])
print(json.dumps(sorted(sys.modules)))
"""


def test_the_demo_needs_no_heavy_imports() -> None:
    finished = subprocess.run([sys.executable, "-c", LOAD_AND_LIST_MODULES], capture_output=True, check=True)
    modules: list[str] = json.loads(finished.stdout)
    assert "tokenizers" in modules
    assert not {"torch", "transformers", "huggingface_hub", "asyncio"} & set(modules)
