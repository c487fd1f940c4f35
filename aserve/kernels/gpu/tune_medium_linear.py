"""``python -m aserve.kernels.gpu.tune_medium_linear``: launches of the medium linear layers that beat torch here.

Prints, for each layer of the models named and each number of tokens, a line for ``MEASURED`` in
medium_linear_launch.py where a launch is faster than torch by more than 1.5 %, else a comment. Times are of the layer
and the norm next to it, in a graph; what a norm takes alone is printed, too. Launches are compiled by all cores first.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from time import perf_counter

import torch
import triton
from triton.runtime.errors import OutOfResources

from aserve.builtin_models import BUILTIN_MODELS
from aserve.kernels.gpu.layer_case import DTYPE, LayerShape, model_layers
from aserve.kernels.gpu.medium_linear import apply_medium_linear
from aserve.kernels.gpu.medium_linear_candidates import candidates
from aserve.kernels.gpu.medium_linear_case import MediumLinearCase
from aserve.kernels.gpu.medium_linear_launch import TOKEN_BUCKETS, MediumLinearLaunch, MediumLinearShape
from aserve.kernels.gpu.small_linear import SmallLinear

MIN_GAIN = 0.015
NUM_FINALISTS = 3
DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Variant:
    """A launch that is to be compiled, and what else the compiler sees of it."""

    layer: LayerShape
    launch: MediumLinearLaunch
    overlap: bool

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for variants that share their code."""
        num_steps = triton.cdiv(triton.cdiv(self.layer.width, self.launch.block_width), self.launch.num_parts)
        return self.launch, num_steps, self.layer.is_gated, self.layer.name == "head", self.layer.num_outputs % 16 == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, tune and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(BUILTIN_MODELS), default=["Qwen3-0.6B", "Qwen3-8B"])
    parser.add_argument("--tokens", type=int, nargs="+", choices=TOKEN_BUCKETS, default=list(TOKEN_BUCKETS[:-1]))
    parser.add_argument("--layers", nargs="+", help="of qkv, o, gate_up, down, head (default: all)", metavar="NAME")
    parser.add_argument("--no-overlap", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--all", action="store_true", help="print the time of each launch, too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile (default: all cores)")
    arguments = parser.parse_args(argv)
    overlap = not arguments.no_overlap
    layers = [
        (model, layer)
        for model in arguments.models
        for layer in model_layers(model)
        if arguments.layers is None or layer.name in arguments.layers
    ]
    start_s = perf_counter()
    variants = {variant.key: variant for _, layer in layers for variant in _variants(layer, arguments.tokens, overlap)}
    _compile_all(list(variants.values()), arguments.jobs)
    compiled_s = perf_counter()
    for model, layer in layers:
        print(f"# {model} {layer.name}")
        case = MediumLinearCase(layer, BUILTIN_MODELS[model]["hidden_size"], DEVICE, overlap)
        for num_tokens in arguments.tokens:
            for line in _tune(layer, case, num_tokens, arguments.all):
                print(line, flush=True)
    print(f"# compiled {len(variants)} in {compiled_s - start_s:.0f} s, timed in {perf_counter() - compiled_s:.0f} s")
    return 0


def _variants(layer: LayerShape, tokens: Sequence[int], overlap: bool) -> Iterator[Variant]:
    for num_tokens in tokens:
        for launch in candidates(_shape(layer, num_tokens)):
            yield Variant(layer, launch, overlap)


def _shape(layer: LayerShape, num_tokens: int) -> MediumLinearShape:
    return MediumLinearShape(layer.num_outputs, layer.width, num_tokens, layer.is_gated)


def _compile_all(variants: Sequence[Variant], num_jobs: int) -> None:
    """Let processes fill Triton's cache on disk; what does not compile is noticed when it is timed."""
    if num_jobs < 2:
        return
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        for compiling in [pool.submit(compile_variant, variant) for variant in variants]:
            compiling.exception()


def compile_variant(variant: Variant) -> None:
    """Compile without touching a value: the layer's memory is asked for, and never used."""
    layer = variant.layer
    x = torch.empty(variant.launch.block_tokens, layer.width, dtype=DTYPE)
    weight = torch.empty(layer.num_rows, layer.width, dtype=DTYPE)
    result = torch.empty(len(x), layer.num_outputs, dtype=torch.float32 if layer.name == "head" else DTYPE)
    small = SmallLinear(weight, is_gated=layer.is_gated)
    apply_medium_linear(x, small, result, variant.overlap, variant.launch, compile_only=True)


def _tune(layer: LayerShape, case: MediumLinearCase, num_tokens: int, prints_all: bool) -> Iterator[str]:
    """Yield a row of the table with what was measured behind it, or a comment; before it what failed."""
    times_us: dict[MediumLinearLaunch, float] = {}
    shape = _shape(layer, num_tokens)
    for launch in candidates(shape):
        try:
            times_us[launch] = case.time_launch(num_tokens, launch)
        except (ArithmeticError, OutOfResources, RuntimeError) as error:
            yield f"# failed: {_format(launch)}: {error}"
    if prints_all:
        yield from (f"# {num_tokens} tokens {time_us:.2f} us {_format(launch)}" for launch, time_us in times_us.items())
    if not times_us:
        return
    finalists = sorted(times_us, key=times_us.__getitem__)[:NUM_FINALISTS]
    best_us, best = min(
        ((case.time_launch(num_tokens, launch), launch) for launch in finalists), key=lambda pair: pair[0]
    )
    torch_us, norm_us = case.time_torch(num_tokens), case.time_norm(num_tokens)
    measured = (
        f"# {best_us:.1f} us, {case.bandwidth(best_us - norm_us):.0f} GB/s beside the norm's {norm_us:.1f}; "
        f"torch {torch_us:.1f}"
    )
    if best_us > torch_us * (1 - MIN_GAIN):
        yield f"# {num_tokens} tokens: torch stays; {_format(best)} {measured}"
        return
    gated = ", is_gated=True" if layer.is_gated else ""
    yield (f"MediumLinearShape({layer.num_outputs}, {layer.width}, {num_tokens}{gated}): {_format(best)},  {measured}")


def _format(launch: MediumLinearLaunch) -> str:
    return f"MediumLinearLaunch({', '.join(map(str, astuple(launch)))})"


if __name__ == "__main__":
    sys.exit(main())
