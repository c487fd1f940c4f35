"""From settings that say "auto" to values, each with the reason; the only place where they are decided."""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from aserve.attention.base import AttentionBackend, dtype_name
from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.kernels.choose import choose_operators
from aserve.kernels.nvfp4 import HEAD_GRAIN, NVFP4
from aserve.kernels.operators import Operators
from aserve.model_files import ModelFiles
from aserve.quantization.base import QuantMethod
from aserve.quantization.registry import resolve_quantization
from aserve.runner.cpu_cores import count_cores
from aserve.runner.kv_pool import KVLayout, check_offsets, count_pages, gpu_memory_gib

logger = logging.getLogger(__name__)

MAX_NUM_SEQS = {"cpu": 32, "cuda": 320}
CPU_KV_MEMORY_GIB = 1.0
KV_DTYPES = {"fp8": torch.float8_e4m3fn, "nvfp4": NVFP4}  # "auto": that of the model
MAX_GPU_DRAFTS = 256  # of one step, each of which has a row of logits


def log_choice(name: str, value: Any, reason: str) -> None:
    """Record how a setting was resolved."""
    logger.info("%s=%s (%s)", name, value, reason)


def resolve_device(setting: str) -> torch.device:
    """Return the device; "auto" takes a GPU if there is one. Raises ConfigError for one that is not there."""
    has_cuda = torch.cuda.is_available()
    if setting == "cuda" and not has_cuda:
        raise ConfigError("device 'cuda' cannot be used here: torch finds no CUDA device")
    name = setting if setting != "auto" else "cuda" if has_cuda else "cpu"
    reason = "as set" if setting != "auto" else "a GPU is present" if has_cuda else "no GPU is present"
    log_choice("device", name, reason)
    return torch.device(name)


def resolve_num_threads(setting: int | None) -> int:
    """Return the number of compute threads."""
    num_threads, reason = (setting, "as set") if setting is not None else count_cores()
    log_choice("num_threads", num_threads, reason)
    return num_threads


def resolve_quant_method(setting: str, files: ModelFiles, device: torch.device) -> QuantMethod:
    """Return how linear layers keep their weights; "auto" is int8 for the demo model on a CPU, else none."""
    method = resolve_quantization(setting, device, is_demo=files.is_demo)
    reason = f"{setting!r} as set"
    if setting == "auto":
        reason = "the demo model on a CPU" if method.name != "none" else "other than the demo on a CPU: only if asked"
    log_choice("quantization", method.name, reason)
    return method


def resolve_operators(device: torch.device) -> Operators:
    """Return the small operators around attention and linear layers."""
    operators = choose_operators(device)
    log_choice("operators", type(operators).__name__, f"the fastest that work on this {device.type}")
    return operators


def resolve_max_num_seqs(setting: int | None, device: torch.device) -> int:
    """Return the number of rows of the page table."""
    value = setting if setting is not None else MAX_NUM_SEQS[device.type]
    log_choice("max_num_seqs", value, "as set" if setting is not None else f"default on {device.type}")
    return value


def resolve_max_num_drafts(config: EngineConfig, max_num_seqs: int) -> int:
    """Return how many drafts a step on a GPU has room for, beside one sample of each sequence."""
    if config.speculation == "none":
        return 0
    value = min(max_num_seqs * config.num_speculative_tokens, MAX_GPU_DRAFTS)
    log_choice("max_num_drafts", value, f"{config.num_speculative_tokens} a sequence, {MAX_GPU_DRAFTS} at most")
    return value


def resolve_kv_dtype(setting: str, dtype: torch.dtype, head_dim: int) -> torch.dtype:
    """Return the type of cached keys and values. Raises ConfigError if heads of ``head_dim`` cannot be kept in it."""
    kv_dtype = KV_DTYPES.get(setting, dtype)
    if kv_dtype == NVFP4 and head_dim % HEAD_GRAIN:
        raise ConfigError(f"kv_cache_dtype 'nvfp4' needs a head_dim that is a multiple of {HEAD_GRAIN}, not {head_dim}")
    log_choice("kv_cache_dtype", dtype_name(kv_dtype), "as set" if setting in KV_DTYPES else "the model's")
    return kv_dtype


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How long a sequence may be and how many pages all of them share."""

    max_model_len: int
    num_pages: int


def resolve_pool_size(
    config: EngineConfig,
    layout: KVLayout,
    max_context_len: int,
    max_num_seqs: int,
    backend: AttentionBackend,
    reserved_bytes: int = 0,
) -> PoolSize:
    """Fit context length and pages to each other and to the memory, of which ``reserved_bytes`` are spoken for.

    Raises ConfigError if the settings ask for more than the model or the memory has.
    """
    wanted_len = wanted_model_len(config, max_context_len)
    page_size = backend.problem.page_size
    most = max_num_seqs * -(-wanted_len // page_size)
    num_pages, reason = _count_pages(config, layout, page_size, most, reserved_bytes)
    if num_pages == most and config.num_pages is None:
        reason = f"what {max_num_seqs} sequences of {wanted_len} tokens need"
    check_offsets(layout, page_size, num_pages, backend)
    log_choice("num_pages", num_pages, f"{page_size} tokens each; {reason}")
    num_tokens = num_pages * page_size
    if num_tokens >= wanted_len:
        log_choice("max_model_len", wanted_len, "as set" if config.max_model_len is not None else "the model's context")
        return PoolSize(wanted_len, num_pages)
    if config.max_model_len is not None:
        raise ConfigError(f"max_model_len {wanted_len} does not fit the KV pool of {num_tokens} tokens ({reason})")
    log_choice("max_model_len", num_tokens, f"the model has {wanted_len}, but the KV pool holds no more")
    return PoolSize(num_tokens, num_pages)


def wanted_model_len(config: EngineConfig, max_context_len: int) -> int:
    """Return the context length that is asked for. Raises ConfigError if the model has not that much."""
    wanted_len = config.max_model_len if config.max_model_len is not None else max_context_len
    if wanted_len > max_context_len:
        raise ConfigError(f"max_model_len {wanted_len} is more than the model's context of {max_context_len} tokens")
    if wanted_len < 2:
        raise ConfigError("max_model_len must leave room for a prompt and an output token: at least 2")
    return wanted_len


def _count_pages(
    config: EngineConfig, layout: KVLayout, page_size: int, most: int, reserved_bytes: int
) -> tuple[int, str]:
    """Return how many pages, ``most`` unless it is set, and what sets the limit."""
    if config.num_pages is not None:
        return config.num_pages, "as set"
    memory_gib, reason = CPU_KV_MEMORY_GIB, "default on a CPU"
    if config.kv_memory_gib is not None:
        memory_gib, reason = config.kv_memory_gib, "as set"
    elif layout.device.type == "cuda":
        page_bytes = layout.page_bytes(page_size)
        memory_gib = gpu_memory_gib(layout.device, config.kv_memory_fraction, reserved_bytes, page_bytes)
        reason = "what the GPU's share leaves beside weights, steps and graphs"
    return min(most, count_pages(layout, page_size, memory_gib)), f"{memory_gib:.3g} GiB, {reason}"
