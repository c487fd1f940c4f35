"""Finding a model's files from what --model says."""

from pathlib import Path

import pytest

from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.model_files import ModelFiles, locate_model


def make_folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_bytes(b"")
    return path


def locate(path: Path | str, revision: str | None = None) -> ModelFiles:
    return locate_model(EngineConfig(model=str(path), revision=revision))


def test_no_model_is_the_demo(demo_files: ModelFiles) -> None:
    assert locate_model(EngineConfig()) == demo_files
    assert demo_files.is_demo


def test_a_gguf_file(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "m", "Tiny.Q8_0.gguf") / "Tiny.Q8_0.gguf"
    assert locate(path) == ModelFiles(path, "gguf", "Tiny.Q8_0")


def test_a_folder_with_safetensors(tmp_path: Path) -> None:
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "pytorch_model.bin"]
    folder = make_folder(tmp_path / "tiny", *names, "also.gguf")
    assert locate(folder) == ModelFiles(folder, "safetensors", "tiny")


def test_a_folder_with_one_gguf(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "model.gguf", "README.md")
    assert locate(folder) == ModelFiles(folder / "model.gguf", "gguf", "model")


def test_the_user_s_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_folder(tmp_path / "tiny", "config.json", "model.safetensors")
    assert locate("~/tiny").path == tmp_path / "tiny"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "neither safetensors nor a GGUF"),
        (["config.json"], "neither safetensors nor a GGUF"),
        (["model.safetensors"], "safetensors but no config.json"),
        (["config.json", "pytorch_model.bin"], r"pickles \(pytorch_model.bin\), which can run any code"),
        (["consolidated.00.pth"], "pickles"),
        (["a.gguf", "b.gguf"], "several GGUF files; name one of a.gguf, b.gguf"),
        (["m-00001-of-00001.gguf"], "split model"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        locate(make_folder(tmp_path / "m", *names))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "is refused: .* pickles"),
        ("model.txt", "is not a model"),
        ("m-00001-of-00002.gguf", "split model"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        locate(make_folder(tmp_path / "m", name) / name)


@pytest.mark.parametrize(
    "model", ["", "gpt2", "./no/such", "/no/such", "a/b/c", "../model", "~nobody-here/x", "org/\0"]
)
def test_what_is_neither_a_path_nor_a_hub_id(model: str) -> None:
    with pytest.raises(ConfigError, match="there is no file or folder"):
        locate(model)


def test_a_revision_needs_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only makes sense with a hub id"):
        locate(make_folder(tmp_path / "m", "model.gguf"), revision="main")
