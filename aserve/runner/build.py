"""From the configuration and a model's files to a runner: everything that is decided at start is decided here."""

from collections.abc import Set

import torch

from aserve.attention.base import AttentionProblem
from aserve.attention.registry import resolve_backend
from aserve.config import EngineConfig
from aserve.kernels.operators import Operators
from aserve.model_files import ModelFiles
from aserve.models.decoder import Decoder
from aserve.runner.base import ModelRunner
from aserve.runner.calibrate import MAX_CPU_TOKENS, MAX_STEP_S, StepCost, StepTimer, measure_step_cost
from aserve.runner.choose_dtype import resolve_dtype
from aserve.runner.compute_thread import ComputeThread
from aserve.runner.executor import DeviceParts, StepExecutor
from aserve.runner.kv_pool import KVLayout, allocate_pool
from aserve.runner.resolve import (
    log_choice,
    resolve_device,
    resolve_max_num_seqs,
    resolve_num_threads,
    resolve_operators,
    resolve_pool_size,
    resolve_quant_method,
)
from aserve.runner.torch_runner import TorchRunner
from aserve.scheduler.limits import Limits
from aserve.weights.load import load_model

GPU_MAX_NUM_BATCHED_TOKENS = 8192


def build_runner(config: EngineConfig, files: ModelFiles, eos_token_ids: Set[int]) -> ModelRunner:
    """Load the model and size everything around it; blocks for seconds.

    Logs every setting that it resolves, with the reason. Raises ConfigError for what this machine or model
    does not allow.
    """
    device = resolve_device(config.device)
    num_threads = resolve_num_threads(config.num_threads)
    torch.set_num_threads(num_threads)
    thread = ComputeThread(num_threads)
    method = resolve_quant_method(config.quantization, files, device)
    dtype = thread.submit(resolve_dtype, config.dtype, device, method).result()
    operators = resolve_operators(device)
    model = load_model(files, device=device, dtype=dtype, quantization=method.name, operators=operators).model
    parts = assemble(config, model, operators, device, dtype)
    executor = StepExecutor(parts, eos_token_ids)
    cost = _resolve_step_cost(config, parts, executor, thread)
    limits = Limits(
        vocab_size=model.config.vocab_size,
        max_model_len=parts.max_model_len,
        max_num_seqs=parts.max_num_seqs,
        max_num_batched_tokens=cost.max_num_batched_tokens,
        num_pages=parts.num_pages,
        page_size=parts.page_size,
        context_cost=cost.context_cost,
    )
    return TorchRunner(executor, limits, thread)


def assemble(
    config: EngineConfig, model: Decoder, operators: Operators, device: torch.device, dtype: torch.dtype
) -> DeviceParts:
    """Choose the attention backend for ``model`` and allocate its pages."""
    shape = model.config
    problem = AttentionProblem(
        device_type=device.type,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=config.page_size,
        kinds=tuple(dict.fromkeys(spec.kind for spec in model.attention_specs())),
    )
    backend = resolve_backend(config.attention_backend, problem, device)
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype, device, backend.kv_order)
    max_num_seqs = resolve_max_num_seqs(config.max_num_seqs, device)
    size = resolve_pool_size(config, layout, shape.max_context_len, max_num_seqs, backend)
    most_tokens = max(MAX_CPU_TOKENS, max_num_seqs) if device.type == "cpu" else GPU_MAX_NUM_BATCHED_TOKENS
    return DeviceParts(
        model=model,
        backend=backend,
        operators=operators,
        layers_kv=allocate_pool(layout, config.page_size, size.num_pages),
        device=device,
        max_num_seqs=max_num_seqs,
        max_model_len=size.max_model_len,
        max_num_tokens=config.max_num_batched_tokens or most_tokens,
        num_pages=size.num_pages,
        page_size=config.page_size,
    )


def _resolve_step_cost(
    config: EngineConfig, parts: DeviceParts, executor: StepExecutor, thread: ComputeThread
) -> StepCost:
    """Return the token budget of a step; what is set is taken as it is, so that attention costs nothing extra."""
    if config.max_num_batched_tokens is not None:
        cost, reason = StepCost(config.max_num_batched_tokens, 0.0), "as set"
    elif parts.device.type == "cuda":
        cost, reason = StepCost(GPU_MAX_NUM_BATCHED_TOKENS, 0.0), "default on a GPU"
    else:
        timer = StepTimer(executor.execute, parts.max_num_seqs, parts.max_model_len)
        cost = thread.submit(measure_step_cost, timer).result()
        reason = f"measured: a full step stays under {MAX_STEP_S * 1000:g} ms"
        log_choice(
            "context_cost", f"{cost.context_cost:.3g}", "measured: of a token's linear layers, per earlier token"
        )
    log_choice("max_num_batched_tokens", cost.max_num_batched_tokens, reason)
    return cost
