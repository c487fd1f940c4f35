"""What ``aserve check`` says of the cake family: which variants a GPU runs, and which of them serve a model."""

from typing import Any

import torch

from aserve.attention.base import AttentionKind, AttentionProblem, dtype_name
from aserve.attention.cake_blackwell import refuse_flash_infer_cake
from aserve.attention.cake_choice import (
    StepChoice,
    choose_decodes,
    choose_prefill,
    choose_several,
    describe_choice,
    num_draft_queries,
)
from aserve.attention.registry import check_variants, refusals_for
from aserve.config import EngineConfig
from aserve.kernels.cake.select_variant import Choice, V, refuse_gpu
from aserve.kernels.cake.tables import TABLES, variant_names
from aserve.kernels.cake.tuned_launches import tune_rows
from aserve.kernels.operators import Operators
from aserve.layers.weighted import WeightFormat
from aserve.model_files import ModelFiles, locate_model
from aserve.models.config import DecoderConfig
from aserve.models.decoder import Decoder
from aserve.quantization.registry import resolve_quantization
from aserve.runner.attention_problem import Gpu, KVFormat, describe_problem
from aserve.runner.resolve import resolve_kv_dtype
from aserve.weights.load import open_checkpoint

Report = dict[str, Any]


def list_variants(gpu: Gpu | None) -> dict[str, str | None]:
    """Map each variant to the reason why ``gpu`` does not run it, None if it does."""
    if gpu is None:
        return dict.fromkeys(variant_names(), "torch finds no CUDA device")
    tuned = [row for rows in TABLES.values() for row in tune_rows(rows, gpu.name, gpu.capability)]
    return {row.name: refuse_gpu(row, gpu.capability) for row in tuned}


def model_report(config: EngineConfig, gpu: Gpu | None) -> Report:
    """Say how each kind of a model's layers would be served; no weights are read.

    ``flash_infer_cake`` is why FlashInfer's own cake kernels do not serve the decodes, None if they do. Without
    speculation the ``drafts`` of layers are None; those that no variant verifies are left to prefill.

    Raises ConfigError for a model that is not there or not known, and for variants of unknown names.
    """
    check_variants(config.cake_variants, config.attention_backend)
    files = locate_model(config)
    problem = _describe(config, files, gpu)
    layers = [_layer_report(problem, kind) for kind in problem.kinds] if gpu is not None else []
    return {
        "name": files.name,
        "attention_backends": refusals_for(problem),
        "flash_infer_cake": refuse_flash_infer_cake(problem),
        "cake_layers": layers,
    }


def _layer_report(problem: AttentionProblem, kind: AttentionKind) -> Report:
    return {
        "heads": f"{kind.num_heads}/{kind.num_kv_heads} x {kind.head_dim}",
        "window": kind.sliding_window,
        "dtype": dtype_name(problem.dtype),
        "kv_dtype": dtype_name(problem.kv_dtype),
        "prefill": _prefill_report(problem, kind),
        "drafts": _drafts_report(problem, kind) if problem.max_drafts else None,
        "decode": [_step_report(step, kind) for step in choose_decodes(problem, kind)],
    }


def _choice_report(choice: Choice[V], summary: str) -> Report:
    return {
        "variant": None if choice.variant is None else choice.variant.name,
        "refused": choice.refusals,
        "summary": summary,
    }


def _prefill_report(problem: AttentionProblem, kind: AttentionKind) -> Report:
    choice = choose_prefill(problem, kind)
    return _choice_report(choice, describe_choice(choice, f"head_dim {kind.head_dim}"))


def _drafts_report(problem: AttentionProblem, kind: AttentionKind) -> Report:
    choice, max_queries = choose_several(problem, kind), num_draft_queries(problem)
    summary = describe_choice(choice, f"head_dim {kind.head_dim}, up to {max_queries} queries of a sequence")
    return {"max_queries": max_queries, **_choice_report(choice, summary)}


def _step_report(step: StepChoice, kind: AttentionKind) -> Report:
    return {"max_seqs": step.max_seqs, **_choice_report(step.choice, step.describe(kind))}


def _describe(config: EngineConfig, files: ModelFiles, gpu: Gpu | None) -> AttentionProblem:
    cpu = torch.device("cpu")
    usual = torch.float32 if gpu is None else torch.bfloat16
    dtype = usual if config.dtype == "auto" else getattr(torch, config.dtype)
    shape = open_checkpoint(files, cpu).config if files.config is None else DecoderConfig.from_hf(files.config)
    method = resolve_quantization("none", cpu, is_demo=False)
    model = Decoder(shape, WeightFormat(method, dtype, torch.device("meta")), Operators())
    kv = KVFormat(resolve_kv_dtype(config.kv_cache_dtype, dtype, shape.head_dim))
    return describe_problem(config, model, cpu if gpu is None else torch.device("cuda"), dtype, kv, gpu or Gpu())
