"""A GGUF file: block formats are expanded tensor by tensor from the mapped file."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from torch import Tensor

from aserve.errors import WeightsError
from aserve.gguf_header import GgufTensor, read_gguf_header
from aserve.models.architectures import ARCHITECTURES
from aserve.models.config import DecoderConfig
from aserve.weights.checkpoint import Checkpoint, StoredTensor

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
PLAIN_TYPES: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
}


class GgufFile(Checkpoint):
    """Reads only the header until it is asked for tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_gguf_header(path)
        if (num_splits := header.metadata.get("split.count", 1)) not in (0, 1):
            raise WeightsError(f"{path} is one of {num_splits} parts; merge them with llama-gguf-split first")
        self._tensors = header.tensors
        self.config = DecoderConfig.from_gguf(header.metadata, header.tensors)

    @property
    def files(self) -> list[Path]:
        return [self.path]

    def tensors(self) -> Iterator[StoredTensor]:
        for label, tensor in self._tensors.items():
            name = model_name(label)
            yield StoredTensor(name, label, self.path, tensor.shape, partial(self._read, label, name, tensor))

    def _read(self, label: str, name: str, tensor: GgufTensor) -> Tensor:
        values = torch.from_numpy(self._expand(label, tensor))
        if ARCHITECTURES[self.config.architecture].has_permuted_gguf:
            if ".q_proj." in name:
                return restore_rotary_order(values, self.config.num_heads)
            if ".k_proj." in name:
                return restore_rotary_order(values, self.config.num_kv_heads)
        return values

    def _expand(self, label: str, tensor: GgufTensor) -> NDArray[Any]:
        """Return the tensor's values as float32, or as float16 if it is stored so."""
        stored = np.memmap(self.path, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
        if plain := PLAIN_TYPES.get(tensor.type):
            return np.array(stored.view(plain).reshape(tensor.shape))
        try:
            expanded: NDArray[Any] = quants.dequantize(stored.reshape(*tensor.shape[:-1], -1), tensor.type)
            return expanded
        except NotImplementedError:
            raise WeightsError(f"tensor {label} in {self.path} has the unsupported type {tensor.type.name}") from None


def model_name(label: str) -> str:
    """Return transformers' name for a GGUF tensor; one that is not known keeps its own."""
    if match := LAYER_TENSOR.fullmatch(label):
        layer, stem, kind = match.groups()
        return f"model.layers.{layer}.{LAYER_NAMES[stem]}.{kind}" if stem in LAYER_NAMES else label
    stem, _, kind = label.rpartition(".")
    return f"{GLOBAL_NAMES[stem]}.{kind}" if stem in GLOBAL_NAMES else label


def restore_rotary_order(values: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of llama files, which put the two halves of each rotary pair side by side.

    values [heads * D, ...]: within a head, rows 0, 2, 4, ... are the first half.
    """
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])  # [heads, D / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(values.shape)
