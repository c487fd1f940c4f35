"""RMS norm, with and without the addition in front; one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aserve.kernels.gpu.launch import launch_options

MAX_WIDTH = 16384  # a row is kept in registers


def rms_norm(x: Tensor, weight: Tensor, eps: float, overlap: bool) -> Tensor:
    """Norm the last dimension of a contiguous ``x``."""
    result = torch.empty_like(x)
    _launch(x, None, weight, result, eps, overlap)
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, overlap: bool) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)`` in the memory of ``x`` and ``residual``, contiguous both."""
    _launch(x, residual, weight, x, eps, overlap)
    return x, residual


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, result: Tensor, eps: float, overlap: bool) -> None:
    width = x.shape[-1]
    num_rows = x.numel() // width
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // 512, 1), 16)
    _norm_rows[(num_rows,)](
        x, residual, weight, result, eps, width, block, overlap, num_warps=num_warps, **launch_options(overlap)
    )


@triton.jit
def _norm_rows(
    x,
    residual,
    weight,
    result,
    eps: float,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Rounds to the activations' dtype where the reference does: the sum, the normed value, the result.

    With a wider weight the normed value is not rounded.
    """
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row + columns, mask=inside, other=0.0)
    if residual is not None:
        stream = tl.load(residual + row + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + stream.to(tl.float32)).to(values.dtype)
        tl.store(residual + row + columns, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = wide * scale
    if weight.dtype.element_ty == x.dtype.element_ty:
        normed = normed.to(values.dtype).to(tl.float32)
    tl.store(result + row + columns, gain.to(tl.float32) * normed, mask=inside)
