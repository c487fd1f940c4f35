"""From the configuration to a runner over one or several ranks: rank 0 is this process, it starts the others."""

import contextlib
import os
import tempfile
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch

from aserve.attention.base import dtype_name
from aserve.config import EngineConfig
from aserve.distributed.context_shard import ContextShard
from aserve.distributed.group import RankGroup
from aserve.distributed.messages import Ready, Setup, encode
from aserve.distributed.rank_process import RankProcess
from aserve.errors import ConfigError
from aserve.model_files import ModelFiles
from aserve.runner.base import ModelRunner
from aserve.runner.build import build_runner
from aserve.runner.choose_dtype import resolve_dtype
from aserve.runner.cpu_cores import count_cores
from aserve.runner.ranks.other_ranks import OtherRanks
from aserve.runner.ranks.ranked_runner import RankedRunner
from aserve.runner.ranks.step_agreement import StepAgreement
from aserve.runner.resolve import log_choice, resolve_device, resolve_quant_method
from aserve.structured.compile import GrammarCompiler

WORKER = "aserve.runner.ranks.worker"
CPU_MAX_NUM_BATCHED_TOKENS = 256


def build_ranks(
    config: EngineConfig, files: ModelFiles, eos_token_ids: Set[int], compiler: GrammarCompiler | None = None
) -> ModelRunner:
    """Build this process's runner and, where the settings ask for more than one rank, those of other processes.

    Raises ConfigError for what this machine or model does not allow on any rank.
    """
    size = config.decode_context_parallel_size
    if size == 1:
        return build_runner(config, files, eos_token_ids, compiler)
    settled = settle(config, files)
    folder = tempfile.TemporaryDirectory(prefix="aserve-", ignore_cleanup_errors=True)
    store = Path(folder.name, "store")
    has_grammars = compiler is not None and bool(compiler.eos_token_ids)
    setups = [
        Setup(rank, size, str(store), settled, files, sorted(eos_token_ids), has_grammars) for rank in range(size)
    ]
    group = RankGroup(ContextShard(0, size), torch.device(settled.device))
    agreement = StepAgreement(size)
    undo = contextlib.ExitStack()
    undo.callback(folder.cleanup)
    try:
        others = OtherRanks(_start(setups[1:], undo), agreement, group.abort)
        undo.callback(group.close)
        undo.callback(group.abort)
        undo.callback(others.end, 0.0)
        others.await_milestone()
        group.join(store)
        local = build_runner(settled, files, eos_token_ids, compiler, group)
        undo.callback(local.close)
        for milestone in others.await_milestone():
            if isinstance(milestone, Ready) and milestone.limits != local.limits:
                raise ConfigError(f"ranks differ in what they allow: {milestone.limits}; rank 0: {local.limits}")
    except BaseException as error:
        undo.close()
        if agreement.failure is not None and not isinstance(error, ConfigError):
            raise ConfigError(str(agreement.failure)) from error
        raise
    return RankedRunner(local, others, agreement, group, folder)


def settle(config: EngineConfig, files: ModelFiles) -> EngineConfig:
    """Return ``config`` with everything decided that ranks might measure differently, for all of them.

    Raises ConfigError if there are fewer GPUs than ranks.
    """
    size = config.decode_context_parallel_size
    device = resolve_device(config.device)
    if device.type == "cuda":
        if (num_gpus := torch.cuda.device_count()) < size:
            raise ConfigError(f"decode_context_parallel_size {size} needs as many GPUs, and torch finds {num_gpus}")
        return replace(config, device="cuda")
    num_threads = config.num_threads or max(1, count_cores()[0] // size)
    dtype = resolve_dtype(config.dtype, device, resolve_quant_method(config.quantization, files, device))
    max_num_batched_tokens = config.max_num_batched_tokens
    if max_num_batched_tokens is None:
        max_num_batched_tokens = CPU_MAX_NUM_BATCHED_TOKENS
        log_choice("max_num_batched_tokens", max_num_batched_tokens, "default for several ranks on a CPU")
    return replace(
        config,
        device="cpu",
        dtype=dtype_name(dtype),  # type: ignore[arg-type]
        num_threads=num_threads,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def _start(setups: Sequence[Setup], undo: contextlib.ExitStack) -> list[RankProcess]:
    """Start the process of each rank and tell it what it is; ``undo`` ends those that run if one cannot be started."""
    processes = []
    for setup in setups:
        environment = {}
        if setup.config.device == "cuda":  # it sees its own GPU alone
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[setup.rank] if visible else str(setup.rank)
        process = RankProcess.start(setup.rank, WORKER, environment)
        undo.callback(process.close)
        undo.callback(process.kill)
        process.send(encode(setup))
        processes.append(process)
    return processes
