"""SiLU or GELU of the gate times the up projection."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aserve.kernels.gpu.launch import launch_options

BLOCK = 1024


def silu_mul(gate_up: Tensor, overlap: bool) -> Tensor:
    """Return silu(gate) * up [T, I] for a contiguous ``gate_up`` [T, 2 * I]."""
    return _launch(gate_up, False, overlap)


def gelu_mul(gate_up: Tensor, overlap: bool) -> Tensor:
    """Return the same with GELU in its tanh approximation."""
    return _launch(gate_up, True, overlap)


def _launch(gate_up: Tensor, is_gelu: bool, overlap: bool) -> Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, BLOCK))
        _gate_mul[grid](gate_up, result, width, is_gelu, BLOCK, overlap, num_warps=4, **launch_options(overlap))
    return result


@triton.jit
def _gate_mul(
    gate_up, result, WIDTH: tl.constexpr, IS_GELU: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + token * (2 * WIDTH) + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    argument = wide
    if IS_GELU:  # 1 + tanh(z) is 2 sigmoid(2 z)
        argument = wide * (1.5957691216057308 + 0.07135481627159471 * wide * wide)  # sqrt(8 / pi), times 0.044715
    activated = (wide / (1.0 + tl.exp(-argument))).to(gate.dtype)  # rounded, as the reference does
    tl.store(result + token * WIDTH + columns, activated.to(tl.float32) * up.to(tl.float32), mask=inside)
