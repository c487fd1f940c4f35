"""What a model asks of attention on a device: known from its shape and the settings, before anything is allocated."""

from dataclasses import dataclass

import torch

from aserve.attention.base import AttentionProblem
from aserve.config import EngineConfig
from aserve.models.decoder import Decoder
from aserve.runner.calibrate import MAX_CPU_TOKENS
from aserve.runner.resolve import resolve_max_num_seqs, wanted_model_len

GPU_MAX_NUM_BATCHED_TOKENS = 8192
DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Gpu:
    """What kernels are chosen by; empty for a CPU."""

    name: str = ""
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """Ask torch about ``device``."""
        if device.type != "cuda":
            return cls()
        return cls(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How the pool stores keys and values."""

    dtype: torch.dtype
    has_head_scales: bool = False


def describe_problem(
    config: EngineConfig, model: Decoder, device: torch.device, dtype: torch.dtype, kv: KVFormat, gpu: Gpu
) -> AttentionProblem:
    """Return the problem for the context and the steps that are asked for; logs what it resolves."""
    max_num_seqs = resolve_max_num_seqs(config.max_num_seqs, device)
    most_tokens = max(MAX_CPU_TOKENS, max_num_seqs) if device.type == "cpu" else GPU_MAX_NUM_BATCHED_TOKENS
    return AttentionProblem(
        device_type=device.type,
        dtype=dtype,
        kv_dtype=kv.dtype,
        page_size=config.page_size or DEFAULT_PAGE_SIZE,
        kinds=tuple(dict.fromkeys(spec.kind for spec in model.attention_specs())),
        capability=gpu.capability,
        gpu_name=gpu.name,
        cake_variants=config.cake_variants,
        max_drafts=0 if config.speculation == "none" else config.num_speculative_tokens,
        max_num_seqs=max_num_seqs,
        max_num_tokens=config.max_num_batched_tokens or most_tokens,
        max_model_len=wanted_model_len(config, model.config.max_context_len),
        has_head_scales=kv.has_head_scales,
    )
