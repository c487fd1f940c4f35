"""``python -m aserve.bench.gpu_operators``: the GPU's small operators beside torch's and FlashInfer's.

Microseconds by graph replay. Activations are in cache, as they are in a model; weights come from memory.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from aserve.bench.report import format_table
from aserve.builtin_models import BUILTIN_MODELS
from aserve.kernels.gpu.gpu_operators import GpuOperators
from aserve.kernels.gpu.layer_case import DTYPE, EPS, LayerCase, head_layout, model_layers
from aserve.kernels.gpu.replay_timer import time_calls
from aserve.kernels.operators import HeadLayout, HeadNorms, KVTarget, Operators

MODELS = ("Qwen3-0.6B", "Qwen3-8B")
NUM_TOKENS = (1, 2, 4, 64, 256)
SMALL_NUM_TOKENS = (1, 2, 3, 4, 8, 16)
CALLS = 20  # in one graph
PAGE_SIZE = 16
DEVICE = torch.device("cuda")

Call = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print two markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(BUILTIN_MODELS), default=MODELS)
    parser.add_argument("--overlap", action="store_true", help="with programmatic dependent launch")
    parser.add_argument("--no-flashinfer", action="store_true", help="leave FlashInfer out, whose kernels may compile")
    arguments = parser.parse_args(argv)
    has_flashinfer = not arguments.no_flashinfer and importlib.util.find_spec("flashinfer") is not None
    operators = GpuOperators(overlap=arguments.overlap)
    print(f"us by tokens: aserve / torch{' / FlashInfer' if has_flashinfer else ''}")
    print(format_table([row for model in arguments.models for row in _operator_rows(model, operators, has_flashinfer)]))
    print("\nGB/s of weight by tokens: one kernel / norm, matrix product, SiLU")
    print(format_table([row for model in arguments.models for row in _layer_rows(model, operators, arguments.overlap)]))
    return 0


def _operator_rows(model: str, operators: GpuOperators, has_flashinfer: bool) -> list[dict[str, str]]:
    rows: dict[str, dict[str, str]] = {}
    for num_tokens in NUM_TOKENS:
        for name, calls in _cases(model, num_tokens, operators, has_flashinfer):
            row = rows.setdefault(name, {"operator": name, "model": model})
            row[str(num_tokens)] = " / ".join(f"{time_calls([call] * CALLS):.1f}" for call in calls)
    return list(rows.values())


def _cases(
    model: str, num_tokens: int, operators: GpuOperators, has_flashinfer: bool
) -> Iterator[tuple[str, list[Call]]]:
    """Yield an operator's name and its calls: ours, torch's and, where there is one, FlashInfer's."""
    config = BUILTIN_MODELS[model]
    x, residual = (torch.randn(num_tokens, config["hidden_size"], device=DEVICE, dtype=DTYPE) for _ in range(2))
    gain = torch.ones(config["hidden_size"], device=DEVICE, dtype=DTYPE)
    gate_up = torch.randn(num_tokens, 2 * config["intermediate_size"], device=DEVICE, dtype=DTYPE)
    both: tuple[Operators, ...] = (operators, Operators())
    norm: list[Call] = [partial(each.rms_norm, x, gain, EPS) for each in both]
    add_norm: list[Call] = [partial(each.add_rms_norm, x, residual, gain, EPS) for each in both]
    silu: list[Call] = [partial(each.silu_mul, gate_up) for each in both]
    if has_flashinfer:
        import flashinfer

        norm.append(partial(flashinfer.rmsnorm, x, gain, EPS))
        add_norm.append(partial(flashinfer.fused_add_rmsnorm, x, residual, gain, EPS))
        silu.append(partial(flashinfer.silu_and_mul, gate_up))
    yield "rms_norm", norm
    yield "add_rms_norm", add_norm
    yield "silu_mul", silu
    yield "rope_store", _rope_calls(head_layout(model), num_tokens, both)


def _rope_calls(heads: HeadLayout, num_tokens: int, both: tuple[Operators, ...]) -> list[Call]:
    head_dim = heads.head_dim
    qkv = torch.randn(num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * head_dim, device=DEVICE, dtype=DTYPE)
    gain = torch.ones(head_dim, device=DEVICE, dtype=DTYPE)
    pages = torch.zeros(2, num_tokens, PAGE_SIZE, heads.num_kv_heads, head_dim, device=DEVICE, dtype=DTYPE)
    slots = torch.arange(num_tokens, device=DEVICE) * PAGE_SIZE
    target = KVTarget(pages[0], pages[1], slots)
    cos_sin = torch.randn(4096, head_dim, device=DEVICE)
    positions = torch.randint(4096, (num_tokens,), device=DEVICE)
    norms = HeadNorms(gain, gain, EPS)
    return [partial(each.rope_store, qkv, heads, norms, cos_sin, positions, target) for each in both]


def _layer_rows(model: str, operators: GpuOperators, overlap: bool) -> Iterator[dict[str, str]]:
    for layer in model_layers(model):
        case = LayerCase(layer, DEVICE)
        row = {"layer": layer.name, "model": model}
        for num_tokens in SMALL_NUM_TOKENS:
            times_us = case.time_fused(num_tokens, overlap), case.time_composed(num_tokens, operators)
            row[str(num_tokens)] = " / ".join(f"{case.bandwidth(time_us):.0f}" for time_us in times_us)
        yield row


if __name__ == "__main__":
    sys.exit(main())
