"""A folder with config.json and one ``model.safetensors``, or several files and their index."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aserve.errors import ConfigError, WeightsError
from aserve.models.architectures import ARCHITECTURES, Architecture
from aserve.models.config import DecoderConfig, is_mxfp4
from aserve.weights.checkpoint import Checkpoint, StoredTensor
from aserve.weights.mxfp4 import BLOCKS, SCALES, expand_mxfp4

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VISION_PARTS = ("vision_tower.", "multi_modal_projector.")
FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}


class SafetensorsFolder(Checkpoint):
    """Opens no weights file before it is asked for tensors, except for the check that index and files agree."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Tensors in MXFP4 are expanded on ``device``."""
        self.path = path
        self._device = device
        config = _read_object(path / "config.json")
        self.config = DecoderConfig.from_hf(config)
        self._is_mxfp4 = is_mxfp4(config)
        self._architecture = ARCHITECTURES[self.config.architecture]
        self._owners = _read_index(path)  # tensor -> file name, None without an index
        self._weight_files = _find_files(path, self._owners)
        if self._owners is not None:
            self._check_index(self._owners)
        if self.config.is_head_tied and self._has_head_of_its_own():
            logger.warning("%s says that the head is tied, but it has a head of its own, which is used", path)
            self.config = replace(self.config, is_head_tied=False)

    @property
    def files(self) -> list[Path]:
        return [self.path / "config.json", *self._weight_files]

    def tensors(self) -> Iterator[StoredTensor]:
        for file in self._weight_files:
            with _open(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    is_owned = self._owners is None or self._owners.get(name) == file.name
                    own_name = model_name(name, self._architecture)
                    if not is_owned or own_name is None or (self._is_mxfp4 and name.endswith(SCALES)):
                        continue
                    if self._is_mxfp4 and name.endswith(BLOCKS):
                        yield self._expanded(opened, file, name.removesuffix(BLOCKS), own_name.removesuffix(BLOCKS))
                    else:
                        yield self._stored(opened, file, name, own_name)

    def _has_head_of_its_own(self) -> bool:
        """Whether a head stands in the files that differs from the embeddings; transformers looks for this as well."""
        pair = [stored.read() for stored in self.tensors() if stored.name in (EMBEDDINGS, HEAD)]
        return len(pair) == 2 and not torch.equal(*pair)

    def _stored(self, opened: Any, file: Path, name: str, own_name: str) -> StoredTensor:
        shape = tuple(opened.get_slice(name).get_shape())
        return StoredTensor(own_name, name, file, shape, partial(_read_tensor, opened, file, name))

    def _expanded(self, opened: Any, file: Path, name: str, own_name: str) -> StoredTensor:
        """Return what blocks and scales in MXFP4 stand for; an index may place the scales in another file."""
        blocks, scales = name + BLOCKS, name + SCALES
        scales_file = file if self._owners is None else self.path / self._owners.get(scales, file.name)
        if scales not in _tensor_names(scales_file):
            raise WeightsError(f"tensor {scales} is missing from {scales_file}, but {file} has {blocks}")
        *outer, num_blocks, block_bytes = opened.get_slice(blocks).get_shape()
        shape = (*outer[:-1], num_blocks * 2 * block_bytes, *outer[-1:])

        def read() -> Tensor:
            with _open(scales_file) as other:
                parts = _read_bytes(opened, file, blocks), _read_bytes(other, scales_file, scales)
            try:
                return expand_mxfp4(*parts, self._device)
            except ValueError as error:
                raise WeightsError(f"tensor {blocks} in {file} cannot be expanded: {error}") from error

        return StoredTensor(own_name, blocks, file, shape, read)

    def _check_index(self, owners: dict[str, str]) -> None:
        """Raise unless each tensor stands in the file that the index names, and the index names each tensor."""
        held = {file.name: _tensor_names(file) for file in self._weight_files}
        for name, file_name in owners.items():
            if name not in held[file_name]:
                raise WeightsError(
                    f"tensor {name} is missing from {self.path / file_name}, where {INDEX_FILE} says it is"
                )
        for file_name, names in held.items():
            if unlisted := sorted(names - owners.keys()):
                raise WeightsError(f"tensor {unlisted[0]} in {self.path / file_name} is not listed in {INDEX_FILE}")


def model_name(name: str, architecture: Architecture) -> str | None:
    """Return what the model's slots call a tensor of a file, None for one that is no part of the model."""
    for part, own in architecture.renamed.items():
        name = name.replace(part, own)
    return text_model_name(name) if architecture.has_vision else name


def text_model_name(name: str) -> str | None:
    """Return what the text model alone calls a tensor of a model with vision; None for a tensor of the vision part.

    Files of before transformers 5 say "language_model.model.norm.weight", others "model.language_model.norm.weight".
    """
    if name.removeprefix("model.").startswith(VISION_PARTS):
        return None
    if name.startswith("model.language_model."):
        return f"model.{name.removeprefix('model.language_model.')}"
    return name.removeprefix("language_model.")


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return content


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return the index's map from tensor to file name; None where one file holds all, which needs no index."""
    file = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file() or not file.is_file():
        return None
    owners = _read_object(file).get("weight_map")
    if not isinstance(owners, dict) or not owners or not all(isinstance(name, str) for name in owners.values()):
        raise WeightsError(f"{file} has no usable weight_map")
    for tensor, name in owners.items():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(f"{file} places tensor {tensor} in {name!r}, which is not a safetensors file beside it")
        if not (folder / name).is_file():
            raise WeightsError(f"{folder / name} does not exist, but {INDEX_FILE} says it holds tensor {tensor}")
    return owners


def _find_files(folder: Path, owners: dict[str, str] | None) -> list[Path]:
    if owners is not None:
        return [folder / name for name in sorted(set(owners.values()))]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise WeightsError(f"{folder} has {len(files)} safetensors files but neither {SINGLE_FILE} nor {INDEX_FILE}")
    pickled = [file.name for pattern in PICKLE_PATTERNS for file in sorted(folder.glob(pattern))]
    if pickled:
        raise WeightsError(
            f"{folder / pickled[0]} is a pickle, which can run code when it is opened, and is refused; "
            "convert the checkpoint to safetensors"
        )
    raise WeightsError(f"{folder} holds no safetensors file")


def _open(file: Path) -> Any:
    """Open ``file``; its header and length are checked here."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is cut short or damaged: {error}") from error


def _tensor_names(file: Path) -> set[str]:
    with _open(file) as opened:
        return set(opened.keys())


def _read_bytes(opened: Any, file: Path, name: str) -> Tensor:
    dtype = opened.get_slice(name).get_dtype()
    if dtype != "U8":
        raise WeightsError(f"tensor {name} in {file} is of the type {dtype}, but MXFP4 is kept in U8")
    tensor: Tensor = opened.get_tensor(name)
    return tensor


def _read_tensor(opened: Any, file: Path, name: str) -> Tensor:
    dtype = opened.get_slice(name).get_dtype()
    if dtype not in FLOAT_DTYPES:
        raise WeightsError(f"tensor {name} in {file} is of the unsupported type {dtype}")
    tensor: Tensor = opened.get_tensor(name)
    return tensor.to(torch.float32) if tensor.dtype is torch.float64 else tensor
