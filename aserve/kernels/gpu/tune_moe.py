"""``python -m aserve.kernels.gpu.tune_moe``: the best launch parameters of mixtures of experts here.

Prints, for each model named and each number of tokens, a line for ``LAUNCHES`` in moe_launch.py by the rows that an
expert has on average, with the time, the bandwidth and the rate, and what the present choice takes.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from triton.runtime.errors import OutOfResources

from aserve.builtin_models import BUILTIN_MODELS
from aserve.kernels.gpu.moe import HOPPER_SHARED_BYTES
from aserve.kernels.gpu.moe_case import MoeCase, find_routing
from aserve.kernels.gpu.moe_launch import RESERVED_BYTES, SUM_PARTS, MoeLaunch, ProductLaunch, choose_moe_launch

DEVICE = torch.device("cuda")
ITEMSIZE = 2
MAX_SUMS = 160  # that a thread keeps
TOKENS = [1, 8, 32, 64, 128, 256, 512, 1024, 4096]


def main(argv: Sequence[str] | None = None) -> int:
    """Tune and print."""
    models = [model for model in BUILTIN_MODELS if find_routing(model) is not None]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models, default=["Qwen3-30B-A3B", "Mixtral-8x7B"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N")
    parser.add_argument("--overlap", action="store_true", help="with programmatic dependent launch")
    arguments = parser.parse_args(argv)
    for model in arguments.models:
        routing = find_routing(model)
        assert routing is not None  # it is one of the choices
        case = MoeCase(model, routing, DEVICE, arguments.overlap)
        for num_tokens in arguments.tokens:
            mean_rows = num_tokens * routing.experts_per_token / routing.num_experts
            print(_tune(case, num_tokens, mean_rows), f"# {model}, {num_tokens} tokens", flush=True)
    return 0


def _tune(case: MoeCase, num_tokens: int, mean_rows: float) -> str:
    """Return a row of the table and, behind it, what was measured."""
    present = choose_moe_launch(mean_rows, ITEMSIZE, HOPPER_SHARED_BYTES)
    best = best_launch(present, lambda launch: _time(case, num_tokens, launch))
    best_us, present_us = (case.time_launch(num_tokens, launch) for launch in (best, present))
    return (
        f"{max(round(mean_rows), 1)}: MoeLaunch({best.block_rows}, {_format(best.gate_up)}, {_format(best.down)}),  "
        f"# {best_us:.1f} us, {case.bandwidth(num_tokens, best_us):.0f} GB/s, "
        f"{case.rate(num_tokens, best_us):.0f} TFLOP/s; present {present_us:.1f}"
    )


def _time(case: MoeCase, num_tokens: int, launch: MoeLaunch) -> float:
    """Return the microseconds, or infinity after saying what failed."""
    try:
        return case.time_launch(num_tokens, launch)
    except (ArithmeticError, OutOfResources, RuntimeError) as error:
        print(f"# failed: {launch}: {error}", flush=True)
        return math.inf


def best_launch(present: MoeLaunch, time_us: Callable[[MoeLaunch], float]) -> MoeLaunch:
    """Return the fastest found: for each number of rows the gate and up product is chosen first, then the other."""
    found = []
    for block_rows in sorted({max(present.block_rows // 2, 16), present.block_rows, min(present.block_rows * 2, 128)}):
        downs = list(candidates(block_rows, 1))
        firsts = [MoeLaunch(block_rows, gate_up, downs[0]) for gate_up in candidates(block_rows, SUM_PARTS)]
        first = min(firsts, key=time_us)
        found.append(min((replace(first, down=down) for down in downs), key=time_us))
    return min(found, key=time_us)


def candidates(block_rows: int, num_parts: int) -> Iterator[ProductLaunch]:
    """Yield launches of a product whose programs have ``num_parts`` weight tiles.

    With as many stages as leave room for a second program on the multiprocessor, and with twice as many.
    """
    for block_outputs, num_warps in ((64, 4), (128, 4), (128, 8)):
        if block_outputs * block_rows * num_parts > MAX_SUMS * 32 * num_warps:
            continue
        for block_width in (64, 128):
            stage_bytes = (block_outputs * num_parts + block_rows) * block_width * ITEMSIZE
            for num_bytes in (HOPPER_SHARED_BYTES // 2, HOPPER_SHARED_BYTES):
                num_stages = min((num_bytes - RESERVED_BYTES) // stage_bytes, 6)
                if num_stages >= 2:
                    yield ProductLaunch(block_outputs, block_width, num_stages, num_warps)


def _format(product: ProductLaunch) -> str:
    return f"ProductLaunch({product.block_outputs}, {product.block_width}, {product.num_stages}, {product.num_warps})"


if __name__ == "__main__":
    sys.exit(main())
