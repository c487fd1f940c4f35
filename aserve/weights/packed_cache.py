"""Packed weights kept on disk, so that the next start copies them instead of expanding and packing the checkpoint.

One file per checkpoint path, layout and dtype, rewritten when the checkpoint changes. The cache never decides
whether a model loads: whatever is wrong with it is logged, and the checkpoint is read instead.
"""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aserve.attention.base import dtype_name
from aserve.config import cache_folder
from aserve.layers.weighted import WeightedLayer, WeightFormat
from aserve.models.decoder import Decoder
from aserve.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

FORMAT_VERSION = "1"
SEPARATOR = "/"  # between a layer's name and its tensor's


class PackedCache:
    """The packed weights of one checkpoint under one weight format."""

    def __init__(self, checkpoint: Checkpoint, weights: WeightFormat) -> None:
        variant = f"{weights.method.layout}-{dtype_name(weights.dtype)}"
        place = hashlib.sha256(str(checkpoint.path.resolve()).encode()).hexdigest()[:16]
        self.path = cache_folder() / "packed" / f"{place}-{variant}.safetensors"
        self._fingerprint = {"format": FORMAT_VERSION, "variant": variant, "source": _describe(checkpoint.files)}

    def restore(self, model: Decoder) -> bool:
        """Fill ``model`` from the cache; return whether that worked. A model is filled whole or not at all."""
        try:
            kept = self._read()
        except (OSError, SafetensorError) as error:
            logger.warning("packed weights in %s are unusable: %s", self.path, error)
            return False
        layers = model.weighted_layers()
        if kept is None or any(layer.name not in kept and _is_required(layer) for layer in layers):
            return False
        for layer in layers:
            layer.restore(kept.get(layer.name, {}))
        logger.info("took packed weights from %s", self.path)
        return True

    def save(self, model: Decoder) -> None:
        """Write the weights of a filled ``model``, replacing the file in one step."""
        tensors = {
            f"{layer.name}{SEPARATOR}{key}": tensor
            for layer in model.weighted_layers()
            for key, tensor in layer.tensors.items()
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(self.path, tensors, self._fingerprint)
        except (OSError, SafetensorError) as error:
            logger.warning("cannot keep packed weights in %s: %s", self.path, error)
            return
        logger.info("kept packed weights in %s", self.path)

    def _read(self) -> dict[str, dict[str, Tensor]] | None:
        """Return layer name -> tensors, views of the mapped file; None if there is no file of this checkpoint state."""
        if not self.path.is_file():
            return None
        kept: dict[str, dict[str, Tensor]] = {}
        with safe_open(self.path, framework="pt", device="cpu") as opened:
            if opened.metadata() != self._fingerprint:
                logger.info("packed weights in %s are of another state of the checkpoint", self.path)
                return None
            for full_name in opened.keys():  # noqa: SIM118 - not a mapping
                layer_name, _, key = full_name.rpartition(SEPARATOR)
                kept.setdefault(layer_name, {})[key] = opened.get_tensor(full_name)
        return kept


def _is_required(layer: WeightedLayer) -> bool:
    return any(not slot.is_optional for slot in layer.slots().values())


def _describe(files: list[Path]) -> str:
    """Return a text that changes when a file is replaced or edited."""
    described = []
    for file in files:
        status = file.stat()
        described.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    return "; ".join(described)


def _write_atomically(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write beside ``path`` and rename, so that a reader finds the old file or the whole new one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
        temporary = Path(file.name)
    try:
        save_file(tensors, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
