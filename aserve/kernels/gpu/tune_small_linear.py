"""``python -m aserve.kernels.gpu.tune_small_linear``: the best launch parameters of the small linear layers here.

Prints, for each layer of the models named, a line for ``MEASURED`` in small_linear_launch.py, with the time, the
bandwidth, and what the present choice and torch's matrix product with fused norms take.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import triton

from aserve.builtin_models import BUILTIN_MODELS
from aserve.kernels.gpu.gpu_operators import GpuOperators
from aserve.kernels.gpu.layer_case import LayerCase, LayerShape, model_layers
from aserve.kernels.gpu.small_linear_launch import WARP_COLUMNS, SmallLinearLaunch, SmallLinearShape, choose_launch

MAX_VALUES = 64  # of a tile that a thread holds
MAX_SUMS = 128  # that a thread keeps along a row
MAX_ROW_LOADS = 4
MIN_PROGRAMS = 256
NUM_FINALISTS = 4
DEVICE = torch.device("cuda")


def main(argv: Sequence[str] | None = None) -> int:
    """Tune and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(BUILTIN_MODELS), default=["Qwen3-0.6B", "Qwen3-8B"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="default: 1", metavar="N")
    parser.add_argument("--layers", nargs="+", help="of qkv, o, gate_up, down, head (default: all)", metavar="NAME")
    parser.add_argument("--overlap", action="store_true", help="with programmatic dependent launch")
    arguments = parser.parse_args(argv)
    for model in arguments.models:
        for layer in model_layers(model):
            if arguments.layers is None or layer.name in arguments.layers:
                case = LayerCase(layer, DEVICE)
                for num_tokens in arguments.tokens:
                    print(_tune(layer, case, num_tokens, arguments.overlap), f"# {model} {layer.name}", flush=True)
    return 0


def candidates(shape: SmallLinearShape) -> Iterator[SmallLinearLaunch]:
    """Yield launch parameters that leave enough registers, and enough loads under way."""
    parts, whole = (2 if shape.is_gated else 1), triton.next_power_of_2(shape.width)
    for block_rows in (1, 2, 4, 8):
        for num_warps in (2, 4, 8, 16):
            one_load = WARP_COLUMNS * num_warps  # the columns that all threads load at once
            tile_values = parts * block_rows * 8
            if one_load < whole and tile_values * shape.token_slots <= MAX_SUMS:
                yield SmallLinearLaunch(block_rows, one_load, num_warps)
            loads = whole // one_load  # of a row
            if 1 <= loads <= MAX_ROW_LOADS and tile_values * loads <= MAX_VALUES:
                for num_steps in (1, 2, 4, 8, 16):
                    if num_steps == 1 or shape.num_outputs >= MIN_PROGRAMS * block_rows * num_steps:
                        yield SmallLinearLaunch(block_rows, whole, num_warps, num_steps)


def best_launch(shape: SmallLinearShape, time_us: Callable[[SmallLinearLaunch], float]) -> SmallLinearLaunch:
    """Return the fastest of the candidates; the first few of one round are timed again."""
    ranked = sorted(candidates(shape), key=time_us)
    return min(ranked[:NUM_FINALISTS], key=time_us)


def _tune(layer: LayerShape, case: LayerCase, num_tokens: int, overlap: bool) -> str:
    """Return a row of the table and, behind it, what was measured."""
    token_slots = triton.next_power_of_2(num_tokens)
    shape = SmallLinearShape(layer.num_outputs, layer.width, token_slots, layer.is_gated)
    best = best_launch(shape, lambda launch: case.time_fused(num_tokens, overlap, launch))
    present = choose_launch(layer.num_outputs, layer.width, token_slots, layer.is_gated)
    best_us, present_us = (case.time_fused(num_tokens, overlap, launch) for launch in (best, present))
    composed_us = case.time_composed(num_tokens, GpuOperators(overlap=overlap))
    gated = ", is_gated=True" if layer.is_gated else ""
    return (
        f"SmallLinearShape({shape.num_outputs}, {shape.width}, {token_slots}{gated}): "
        f"SmallLinearLaunch({best.block_rows}, {best.block_columns}, {best.num_warps}, {best.num_steps}),  "
        f"# {best_us:.1f} us, {case.bandwidth(best_us):.0f} GB/s; present {present_us:.1f}, torch {composed_us:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
