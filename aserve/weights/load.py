"""From a model's files to a decoder that is ready to run."""

from dataclasses import dataclass

import torch

from aserve.kernels.operators import Operators
from aserve.layers.weighted import WeightFormat
from aserve.model_files import ModelFiles
from aserve.models.config import DecoderConfig
from aserve.models.decoder import Decoder
from aserve.quantization.registry import resolve_quantization
from aserve.weights.checkpoint import Checkpoint
from aserve.weights.fill import fill
from aserve.weights.gguf_file import GgufFile
from aserve.weights.memory import check_memory, explain_exhaustion
from aserve.weights.packed_cache import PackedCache
from aserve.weights.random_weights import fill_with_random
from aserve.weights.safetensors_folder import SafetensorsFolder


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with all its weights, and its shape."""

    model: Decoder
    config: DecoderConfig


@torch.inference_mode()
def load_model(
    files: ModelFiles, *, device: torch.device, dtype: torch.dtype, quantization: str, operators: Operators
) -> LoadedModel:
    """Load ``files`` in one pass; ``quantization`` is "auto", "none", "int8" or a quant method's own name.

    Raises ConfigError for a model that is not supported or does not fit on the GPU, WeightsError (a ConfigError)
    naming tensor and file for a checkpoint that is incomplete or damaged.
    """
    method = resolve_quantization(quantization, device, is_demo=files.is_demo)
    weights = WeightFormat(method, dtype, device)
    with explain_exhaustion(device, "loading weights"):
        if files.config is not None:
            model = _draw(DecoderConfig.from_hf(files.config), weights, operators)
        else:
            model = _load_checkpoint(open_checkpoint(files, device), weights, operators)
    return LoadedModel(model, model.config)


def _draw(config: DecoderConfig, weights: WeightFormat, operators: Operators) -> Decoder:
    model = Decoder(config, weights, operators)
    check_memory(model, weights)
    fill_with_random(model)
    return model


def _load_checkpoint(checkpoint: Checkpoint, weights: WeightFormat, operators: Operators) -> Decoder:
    model = Decoder(checkpoint.config, weights, operators)
    check_memory(model, weights)
    cache = PackedCache(checkpoint, weights) if weights.method.layout else None
    if cache is None or not cache.restore(model):
        fill(model, checkpoint)
        if cache is not None:
            cache.save(model)
    return model


def open_checkpoint(files: ModelFiles, device: torch.device) -> Checkpoint:
    """Open the files of a model that has weights and check that they fit together; no weights are read.

    What is compressed may be expanded on ``device``.
    """
    return GgufFile(files.path) if files.format == "gguf" else SafetensorsFolder(files.path, device)
