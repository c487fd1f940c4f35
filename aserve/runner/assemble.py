"""Model, attention backend and KV pool as the parts that a step runs on."""

from dataclasses import replace

import torch

from aserve.attention.base import AttentionBackend, AttentionProblem
from aserve.attention.context_parallel import ContextParallelBackend, own_problem
from aserve.attention.registry import resolve_backend
from aserve.config import EngineConfig
from aserve.distributed.group import RankGroup
from aserve.kernels.operators import Operators
from aserve.model_files import ModelFiles
from aserve.models.decoder import Decoder
from aserve.runner.attention_problem import Gpu, KVFormat, describe_problem
from aserve.runner.executor import DeviceParts
from aserve.runner.kv_pool import KVLayout, allocate_pool
from aserve.runner.kv_scales import resolve_kv_scales, take_from_first_rank
from aserve.runner.resolve import (
    PoolSize,
    log_choice,
    resolve_kv_dtype,
    resolve_pool_size,
)


def assemble(
    config: EngineConfig,
    files: ModelFiles,
    model: Decoder,
    operators: Operators,
    device: torch.device,
    dtype: torch.dtype,
    group: RankGroup | None = None,
) -> DeviceParts:
    """Choose the attention backend for ``model`` and allocate its pages, of which each rank of ``group`` has a part."""
    parts, layout = outline(config, files, model, operators, device, dtype, group)
    return with_pool(config, parts, layout)


def outline(
    config: EngineConfig,
    files: ModelFiles,
    model: Decoder,
    operators: Operators,
    device: torch.device,
    dtype: torch.dtype,
    group: RankGroup | None = None,
) -> tuple[DeviceParts, KVLayout]:
    """Return the parts with no pages but the dummy ones, for the context that is asked for, and the pages' layout."""
    shape = model.config
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, shape.head_dim)
    scales = resolve_kv_scales(model, files, kv_dtype, dtype, device, operators)
    if group is not None:
        scales = take_from_first_rank(scales, group)
    kv = KVFormat(kv_dtype, has_head_scales=any(layer.are_per_head for layer in scales))
    problem = describe_problem(config, model, device, dtype, kv, Gpu.of(device))
    backend = _choose_backend(config, problem, device, group)
    page_size = backend.problem.page_size
    layout = KVLayout(
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        kv_dtype,
        device,
        backend.kv_order,
        scales,
        num_ranks=1 if group is None else group.shard.size,
    )
    parts = DeviceParts(
        model=model,
        backend=backend,
        operators=operators,
        layers_kv=allocate_pool(layout, page_size, 0),
        device=device,
        max_num_seqs=problem.max_num_seqs,
        max_model_len=problem.max_model_len,
        max_num_tokens=problem.max_num_tokens,
        num_pages=0,
        page_size=page_size,
        group=group,
    )
    return parts, layout


def _choose_backend(
    config: EngineConfig, problem: AttentionProblem, device: torch.device, group: RankGroup | None
) -> AttentionBackend:
    """Return the backend for ``problem``, which among several ranks is one over the keys of all of them."""
    own = problem if group is None else own_problem(problem, group.shard)
    backend = resolve_backend(config.attention_backend, own, device, may_change_page_size=config.page_size is None)
    return backend if group is None else ContextParallelBackend(backend, problem, group.shard, group.all_gather)


def with_pool(config: EngineConfig, parts: DeviceParts, layout: KVLayout, reserved_bytes: int = 0) -> DeviceParts:
    """Return ``parts`` with as many pages as the settings and the memory beside ``reserved_bytes`` allow.

    The length of a sequence is known then, so the model is fitted to it.
    """
    size = resolve_pool_size(
        config, layout, parts.model.config.max_context_len, parts.max_num_seqs, parts.backend, reserved_bytes
    )
    if parts.group is not None:
        size = _agree(size, parts.group)
    _fit(parts.model, size.max_model_len)
    return replace(
        parts,
        layers_kv=allocate_pool(layout, parts.page_size, size.num_pages),
        num_pages=size.num_pages,
        max_model_len=size.max_model_len,
    )


def _agree(size: PoolSize, group: RankGroup) -> PoolSize:
    """Return the size that every rank of ``group`` has memory for; waits for them."""
    agreed = PoolSize(group.min(size.max_model_len), group.min(size.num_pages))
    if agreed != size:
        log_choice("num_pages", agreed.num_pages, "what the rank with the least memory holds")
        log_choice("max_model_len", agreed.max_model_len, "what the rank with the least memory holds")
    return agreed


def _fit(model: Decoder, max_model_len: int) -> None:
    """Tell the model how long a sequence may get, and the log what follows from it."""
    model.fit(max_model_len)
    rope = model.config.rope
    if rope.scaling == "longrope":
        kind, comparison = ("long", "above") if rope.takes_long_factors(max_model_len) else ("short", "within")
        reason = f"max_model_len is {comparison} the model's original {rope.original_context_len} tokens"
        log_choice("rope_factors", kind, reason)
