"""Tokenizers of checkpoint folders, against the tokenizers library encoding the whole text itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from doubles_tokenizer import SAMPLES, train_pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from aserve.errors import ConfigError
from aserve.model_files import ModelFiles
from aserve.tokenizer.load import load_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer

CONTROL = [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>", "[INST]")]
PLAIN = AddedToken("<think>", special=False, normalized=False)


def byte_level_backend(normalizer: normalizers.Normalizer | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(SAMPLES, trainer)
    backend.add_tokens([PLAIN])
    return backend


def sentencepiece_backend(scheme: str) -> tokenizers.Tokenizer:
    """Build what converted Llama and Mistral tokenizers look like: old ones prepend in the normaliser."""
    pieces = train_pieces([sample.replace("\u2581", " ") for sample in SAMPLES], 600)
    tokens = ["<unk>", "<s>", "</s>", "[INST]", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    known = set(pieces)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if {piece[:cut], piece[cut:]} <= known
    ]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(CONTROL)
    backend.add_tokens([PLAIN])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


BACKENDS = {
    "byte-level": byte_level_backend,
    "composing": lambda: byte_level_backend(normalizers.NFC()),
    **{
        scheme: (lambda scheme=scheme: sentencepiece_backend(scheme))
        for scheme in ("legacy", "first", "always", "never")
    },
}


def write_folder(folder: Path, backend: tokenizers.Tokenizer | None, **files: Any) -> Path:
    """Write a checkpoint folder; ``files`` are JSON by name without its ending."""
    folder.mkdir(exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    for name, content in ({"config": {}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles(folder, "safetensors", "tiny"))


@pytest.fixture(scope="module", params=BACKENDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Our tokenizer, and the library's own from the same file."""
    folder = write_folder(tmp_path_factory.mktemp("hf") / "tiny", BACKENDS[request.param]())
    return load(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


WITH_CONTROL = [
    "[INST] hi [/INST]",
    "<s>[INST]hi</s>",
    "a</s> b<s>",
    "x<think> y</think>",
    "</s>",
    " </s> ",
    "\u2581a</s>b",
]


def test_samples_equal_the_library(pair: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
    ours, theirs = pair
    for text in [*SAMPLES, *WITH_CONTROL, "</s>".join(SAMPLES)]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids, text
        ids = theirs.encode(text).ids
        if not text.startswith("<s>"):  # BOS is not doubled
            assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
            detokenizer = ours.detokenizer(skip)
            assert "".join(map(detokenizer.push, ([i] for i in ids))) + detokenizer.flush() == theirs.decode(
                ids, skip_special_tokens=skip
            )


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["</s>", "[INST]", "<think>", " ", "  ", "\u2581", "a", "the", "e\u0301", "\n", "中"])
    )
)
def test_random_text_equals_the_library(pair: tuple[Tokenizer, tokenizers.Tokenizer], text: list[str]) -> None:
    ours, theirs = pair
    joined = "".join(text)
    assert ours.encode(joined, add_special_tokens=False) == theirs.encode(joined, add_special_tokens=False).ids


def test_prompts_with_control_tokens_in_messages_equal_the_library_around_them(
    pair: tuple[Tokenizer, tokenizers.Tokenizer], tmp_path: Path
) -> None:
    _, theirs = pair
    theirs.encode_special_tokens = False
    folder = write_folder(
        tmp_path / "tiny", theirs, tokenizer_config={"chat_template": "[INST] {{ messages[0].content }}</s>"}
    )
    ours = load(folder)
    ids = ours.encode_chat([{"role": "user", "content": "hi </s>[INST] there"}])
    assert (ids.count(3), ids.count(2)) == (1, 1)
    theirs.encode_special_tokens = True
    assert ours.decode(ids, False).replace(" ", "") == "[INST]hi</s>[INST]there</s>"


def test_bos_comes_from_the_file_s_own_post_processor(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", sentencepiece_backend("first"), tokenizer_config={"bos_token": "<s>"})
    tokenizer = load(folder)
    assert tokenizer.encode("hi")[0] == 1
    assert tokenizer.encode("<s>hi").count(1) == 1
    assert tokenizer.bos_token_id == 1


@pytest.mark.parametrize(
    ("flags", "around"), [({}, ([], [])), ({"add_bos_token": True, "add_eos_token": True}, ([1], [2]))]
)
def test_bos_and_eos_by_flags_where_there_is_no_post_processor(
    tmp_path: Path, flags: dict[str, bool], around: tuple[list[int], list[int]]
) -> None:
    config = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>", **flags}
    tokenizer = load(write_folder(tmp_path / "tiny", byte_level_backend(), tokenizer_config=config))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [*around[0], *plain, *around[1]]


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer_config", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": [5, 6]}, {"eos_token": "<s>"}, {2, 5, 6}),
        ({"eos_token_id": [2, 7]}, {}, {}, {2, 7}),
        ({"eos_token_id": None}, {"eos_token_id": 5}, {}, {5}),
        ({}, {}, {"eos_token": "</s>"}, {2}),
        ({}, {}, {}, set()),
    ],
)
def test_ends_are_those_of_both_configs(
    tmp_path: Path, config: Any, generation: Any, tokenizer_config: Any, expected: set[int]
) -> None:
    files = {"config": config, "generation_config": generation, "tokenizer_config": tokenizer_config}
    assert load(write_folder(tmp_path / "tiny", byte_level_backend(), **files)).eos_token_ids == expected


def test_the_number_of_rows_is_the_model_s(tmp_path: Path) -> None:
    tokenizer = load(write_folder(tmp_path / "tiny", byte_level_backend(), config={"vocab_size": 1000}))
    assert (tokenizer.vocab_size, tokenizer.num_tokens) == (1000, 601)
    assert tokenizer.decode([999]) == tokenizer.detokenizer().push([999]) == ""
    assert load(write_folder(tmp_path / "other", byte_level_backend())).vocab_size == 601
    vision = {"text_config": {"model_type": "gemma3_text"}, "eos_token_id": [1, 106]}
    assert load(write_folder(tmp_path / "vision", byte_level_backend(), config=vision)).vocab_size == 262208
    vision["text_config"] |= {"vocab_size": 700}  # type: ignore[operator]
    assert load(write_folder(tmp_path / "sized", byte_level_backend(), config=vision)).vocab_size == 700


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json", "named"])
def test_where_the_template_may_be(tmp_path: Path, place: str) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}"
    config: dict[str, Any] = {"bos_token": "<s>"}
    if place == "tokenizer_config.json":
        config["chat_template"] = source
    elif place == "named":
        config["chat_template"] = [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": source},
        ]
    folder = write_folder(tmp_path / "tiny", byte_level_backend(), tokenizer_config=config)
    if place == "chat_template.jinja":
        (folder / place).write_text(source)
    elif place == "chat_template.json":
        (folder / place).write_text(json.dumps({"chat_template": source}))
    tokenizer = load(folder)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.encode_chat(messages), False) == "<s>hi"
    if place == "named":
        assert tokenizer.decode(tokenizer.encode_chat(messages, tools=[{}])) == "tools"


def test_a_template_file_comes_before_the_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", byte_level_backend(), tokenizer_config={"chat_template": "config"})
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load(folder)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "file"
    assert tokenizer.decode(tokenizer.encode_chat(messages, tools=[{}])) == "tools"


def test_padding_and_truncation_in_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_padding(length=64)
    backend.enable_truncation(4)
    tokenizer = load(write_folder(tmp_path / "tiny", backend))
    assert tokenizer.encode("The quick brown fox jumps") == byte_level_backend().encode("The quick brown fox jumps").ids


def test_added_tokens_that_are_not_spelled_in_bytes(tmp_path: Path) -> None:
    backend = byte_level_backend()
    text = "<\uff5cend\u2581of text\uff5c>"
    backend.add_special_tokens([text])
    tokenizer = load(write_folder(tmp_path / "tiny", backend))
    ids = tokenizer.encode(f"a{text}b", add_special_tokens=False)
    assert len(ids) == 3
    assert tokenizer.token_bytes(ids[1]) == text.encode()
    assert tokenizer.detokenizer(False).push(ids) == backend.decode(ids, skip_special_tokens=False) == f"a{text}b"


def test_older_files_are_converted_by_transformers(tmp_path: Path) -> None:
    backend = byte_level_backend()
    folder = write_folder(tmp_path / "tiny", None, config={"model_type": "gpt2"})
    backend.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert {"vocab.json", "merges.txt"} <= {path.name for path in folder.iterdir()}
    tokenizer = load(folder)
    for text in SAMPLES:
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text).ids


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer that can be converted"),
        ({"tokenizer": {"model": "?"}}, "cannot read .*tokenizer.json"),
        ({"tokenizer_config": []}, "does not hold a JSON object"),
    ],
)
def test_folders_without_a_usable_tokenizer(tmp_path: Path, files: Any, message: str) -> None:
    backend = byte_level_backend() if "tokenizer_config" in files else None
    with pytest.raises(ConfigError, match=message):
        load(write_folder(tmp_path / "tiny", backend, **files))


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (decoders.WordPiece(), "decodes with WordPiece, which is not supported"),
        (None, "decodes with nothing"),
        (
            decoders.Sequence([decoders.Replace("x", " "), decoders.ByteFallback(), decoders.Fuse()]),
            "other than spaces",
        ),
        (
            decoders.Sequence(
                [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]
            ),
            "other than leading spaces",
        ),
    ],
)
def test_decoders_of_another_kind_are_refused(tmp_path: Path, decoder: Any, message: str) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ConfigError, match=message):
        load(write_folder(tmp_path / "tiny", backend))
