"""Linear layers for a handful of tokens, with what stands before and after them in the same kernel.

With so few tokens a layer takes as long as its weight takes to arrive from memory. Each program owns some rows of the
weight and streams them past registers; the few kilobytes of activations come from cache, so every program norms
them anew. The norm's factor is applied to the finished sums, so that one pass is enough.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from aserve.kernels.gpu.launch import launch_options
from aserve.kernels.gpu.small_linear_kernels import walk_along_rows, walk_from_rows_to_rows
from aserve.kernels.gpu.small_linear_launch import SmallLinearLaunch, choose_launch

MAX_TOKENS = 4
MAX_PRODUCTS = 1 << 24  # of weights and tokens beyond one


def is_small(num_tokens: int, num_weights: int) -> bool:
    """Whether the kernel is faster than a norm kernel and a matrix product, as measured on an H200.

    One token always is. The kernel multiplies without matrix units, so that more tokens pay for small weights only:
    4 tokens for 3 million weights, 2 for 6 million.
    """
    return num_tokens == 1 or (1 < num_tokens <= MAX_TOKENS and num_tokens * num_weights <= MAX_PRODUCTS)


@dataclass(frozen=True, slots=True)
class NormBefore:
    """RMS norm of the input, of ``x + residual`` if there is a residual [T, in]."""

    weight: Tensor
    eps: float
    residual: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SmallLinear:
    """A layer: weight [out, in], dense, bias [out]; ``is_gated`` returns silu(first half of out) * second half."""

    weight: Tensor
    bias: Tensor | None = None
    is_gated: bool = False

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // 2 if self.is_gated else self.weight.shape[0]


def apply_small_linear(
    x: Tensor,
    layer: SmallLinear,
    norm: NormBefore | None,
    result: Tensor,
    overlap: bool,
    launch: SmallLinearLaunch | None = None,
) -> Tensor:
    """Write layer(norm(x)) to ``result`` [T, out], of any float dtype; return x + residual, x itself without one.

    x is [T, in], T at least 1.
    """
    num_tokens, width = x.shape
    token_slots = triton.next_power_of_2(num_tokens)
    launch = launch or choose_launch(layer.num_outputs, width, token_slots, layer.is_gated)
    residual = None if norm is None else norm.residual
    total = x if residual is None else torch.empty_like(x)  # other programs still read the old residual
    num_blocks = triton.cdiv(layer.num_outputs, launch.block_rows)
    is_whole = launch.block_columns >= width
    kernel = walk_from_rows_to_rows if is_whole else walk_along_rows
    steps = {"NUM_STEPS": launch.num_steps} if is_whole else {}
    kernel[(triton.cdiv(num_blocks, launch.num_steps if is_whole else 1),)](
        x,
        residual,
        total,
        None if norm is None else norm.weight,
        layer.weight,
        layer.bias,
        result,
        num_tokens,
        0.0 if norm is None else norm.eps,
        NUM_OUTPUTS=layer.num_outputs,
        WIDTH=width,
        TOKEN_SLOTS=token_slots,
        IS_GATED=layer.is_gated,
        BLOCK_ROWS=launch.block_rows,
        BLOCK_COLUMNS=launch.block_columns,
        OVERLAP=overlap,
        num_warps=launch.num_warps,
        **steps,
        **launch_options(overlap),
    )
    return total
