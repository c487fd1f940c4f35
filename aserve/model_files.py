"""Where a model's files are and what kind they are; knows no tensors and no tokenizer."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aserve.builtin_models import find_builtin, require_builtin
from aserve.config import EngineConfig
from aserve.errors import ConfigError

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>.+))?")
SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLE_REFUSAL = (
    "its weights are only there as pickles ({names}), which can run any code when they are loaded; "
    "convert them to safetensors"
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: a ``.gguf`` file, or a folder with config.json and ``*.safetensors``.

    Format "random" has no weights, only ``config``, the content of config.json; its ``path`` is the folder that this
    came from, or the name of a built-in config.
    """

    path: Path
    format: Literal["gguf", "safetensors", "random"]
    name: str  # what clients call it unless --served-model-name says otherwise
    is_demo: bool = False
    config: Mapping[str, Any] | None = None


def locate_model(config: EngineConfig) -> ModelFiles:
    """Return the files of ``config.model``: the demo model, a local path, or a hub id, which is downloaded.

    A GGUF file in a hub repository is named as ``org/name:file.gguf``. Raises ConfigError saying what is wrong.
    """
    if config.random_weights:
        return _locate_random(config)
    if config.model is None:
        # Imported here, since both modules build on ModelFiles.
        from aserve.demo_model import find_demo_model

        return find_demo_model()
    path = Path(os.path.expanduser(config.model))
    if config.model and path.exists():
        if config.revision is not None:
            raise ConfigError(f"a revision ({config.revision}) only makes sense with a hub id; {path} is local")
        return _locate_local(path)
    match = HUB_ID.fullmatch(config.model)
    if match is None:
        advice = "; its shape is built in: add --random-weights" if find_builtin(config.model) else ""
        raise ConfigError(
            f"there is no file or folder {config.model!r}, and it is not a hub id of the form org/name{advice}"
        )
    from aserve.hub import fetch

    return fetch(match["repo"], config.revision, match["file"])


def pick_gguf(names: Sequence[str], wanted: str | None) -> str | None:
    """Return the one GGUF among ``names``: the file called ``wanted``, else the only one with that in its name."""
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    matching = [name for name in ggufs if wanted is None or wanted.lower() in name.lower()]
    if wanted in ggufs:
        matching = [wanted]
    for name in matching:
        _refuse_part(name)
    return matching[0] if len(matching) == 1 else None


def explain_refusal(names: Sequence[str], wanted: str | None = None) -> str:
    """Say why a folder or repository with these files cannot be served."""
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if ggufs:
        missing = "it holds several GGUF files" if wanted is None else f"it holds not exactly one GGUF file {wanted}"
        return f"{missing}; name one of {', '.join(ggufs)}"
    if wanted is not None:
        return f"it holds no GGUF file {wanted}"
    if any(name.endswith(".safetensors") for name in names):
        return "it has safetensors but no config.json"
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        return PICKLE_REFUSAL.format(names=", ".join(pickles[:3]))
    return "it has neither safetensors nor a GGUF file"


def _locate_random(config: EngineConfig) -> ModelFiles:
    if config.model is None:
        raise ConfigError("random weights need a model: a folder with config.json or the name of a built-in config")
    if config.revision is not None:
        raise ConfigError(f"a revision ({config.revision}) makes no sense with random weights")
    folder = Path(os.path.expanduser(config.model))
    if not folder.exists():
        name, content = require_builtin(config.model)
        return ModelFiles(Path(name), "random", name, config=content)
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"random weights need a config.json, but that of {folder} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{folder / 'config.json'} does not hold a JSON object")
    return ModelFiles(folder, "random", folder.resolve().name, config=content)


def _locate_local(path: Path) -> ModelFiles:
    if path.is_dir():
        return _locate_folder(path)
    if path.suffix.lower() == ".gguf":
        _refuse_part(str(path))
        return ModelFiles(path, "gguf", path.stem)
    if path.suffix in PICKLE_SUFFIXES:
        raise ConfigError(f"{path} is refused: {PICKLE_REFUSAL.format(names=path.name)}")
    raise ConfigError(f"{path} is not a model: expected a .gguf file, or a folder with config.json and safetensors")


def _refuse_part(name: str) -> None:
    if SPLIT_GGUF.search(name):
        raise ConfigError(f"{name} is one part of a split model; join the parts with llama.cpp's gguf-split --merge")


def _locate_folder(folder: Path) -> ModelFiles:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    if "config.json" in names and any(file.endswith(".safetensors") for file in names):
        return ModelFiles(folder, "safetensors", folder.resolve().name)
    gguf = pick_gguf(names, None)
    if gguf is None:
        raise ConfigError(f"{folder} cannot be served: {explain_refusal(names)}")
    return ModelFiles(folder / gguf, "gguf", Path(gguf).stem)
