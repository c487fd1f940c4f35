"""From the configuration and a model's files to a runner: everything that is decided at start is decided here."""

from collections.abc import Set

import torch

from aserve.attention.registry import check_names, check_variants
from aserve.config import EngineConfig
from aserve.distributed.group import RankGroup
from aserve.model_files import ModelFiles
from aserve.runner.assemble import assemble, outline
from aserve.runner.base import ModelRunner
from aserve.runner.calibrate import MAX_STEP_S, StepCost, StepTimer, measure_step_cost
from aserve.runner.choose_dtype import resolve_dtype
from aserve.runner.compute_thread import ComputeThread
from aserve.runner.executor import DeviceParts, StepExecutor
from aserve.runner.resolve import (
    log_choice,
    resolve_device,
    resolve_num_threads,
    resolve_operators,
    resolve_quant_method,
)
from aserve.runner.torch_runner import TorchRunner
from aserve.scheduler.limits import Limits
from aserve.structured.compile import GrammarCompiler
from aserve.weights.load import load_model
from aserve.weights.memory import explain_exhaustion


def build_runner(
    config: EngineConfig,
    files: ModelFiles,
    eos_token_ids: Set[int],
    compiler: GrammarCompiler | None = None,
    group: RankGroup | None = None,
) -> ModelRunner:
    """Load the model in this process and size everything around it; blocks for seconds.

    Requests may have grammars if there is a ``compiler``. The ranks of a ``group`` build at the same time, of the same
    settings.

    Logs every setting that it resolves, with the reason. Raises ConfigError for what this machine or model
    does not allow.
    """
    device = resolve_device(config.device)
    check_names(config.attention_backend)
    check_variants(config.cake_variants, config.attention_backend)
    num_threads = resolve_num_threads(config.num_threads)
    torch.set_num_threads(num_threads)
    thread = ComputeThread(num_threads)
    method = resolve_quant_method(config.quantization, files, device)
    dtype = thread.submit(resolve_dtype, config.dtype, device, method).result()
    operators = resolve_operators(device)
    model = load_model(files, device=device, dtype=dtype, quantization=method.name, operators=operators).model
    if device.type == "cuda":
        thread.close()
        # Imported here, since a machine without a GPU may have no Triton.
        from aserve.runner.cuda.build import build_cuda_runner

        with explain_exhaustion(device, "preparing attention"):
            parts, layout = outline(config, files, model, operators, device, dtype, group)
        return build_cuda_runner(config, parts, layout, eos_token_ids, compiler)
    parts = thread.submit(assemble, config, files, model, operators, device, dtype, group).result()
    return _build_cpu_runner(config, parts, StepExecutor(parts, eos_token_ids, compiler), thread)


def _build_cpu_runner(
    config: EngineConfig, parts: DeviceParts, executor: StepExecutor, thread: ComputeThread
) -> TorchRunner:
    cost = _resolve_step_cost(config, parts, executor, thread)
    limits = Limits(
        vocab_size=parts.model.config.vocab_size,
        max_model_len=parts.max_model_len,
        max_num_seqs=parts.max_num_seqs,
        max_num_batched_tokens=cost.max_num_batched_tokens,
        num_pages=parts.num_pages,
        page_size=parts.page_size,
        context_cost=cost.context_cost,
    )
    return TorchRunner(executor, limits, thread)


def _resolve_step_cost(
    config: EngineConfig, parts: DeviceParts, executor: StepExecutor, thread: ComputeThread
) -> StepCost:
    """Return the token budget of a step; what is set is taken as it is, so that attention costs nothing extra."""
    if config.max_num_batched_tokens is not None:
        cost, reason = StepCost(config.max_num_batched_tokens, 0.0), "as set"
    else:
        timer = StepTimer(executor.execute, parts.max_num_seqs, parts.max_model_len)
        cost = thread.submit(measure_step_cost, timer).result()
        reason = f"measured: a full step stays under {MAX_STEP_S * 1000:g} ms"
        log_choice(
            "context_cost", f"{cost.context_cost:.3g}", "measured: of a token's linear layers, per earlier token"
        )
    log_choice("max_num_batched_tokens", cost.max_num_batched_tokens, reason)
    return cost
