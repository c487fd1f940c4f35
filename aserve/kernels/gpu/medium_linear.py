"""Linear layers for some tokens: more than a few, and too few for the matrix units to be what they wait for.

They still take as long as the weight takes to arrive. The kernel is launched while the one before it runs, asks for its
share of the weight at once, and lets the next one do the same, none of which torch's matrix product does; and it gates.
"""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aserve.kernels.gpu.launch import launch_options
from aserve.kernels.gpu.medium_linear_kernels import add_parts, multiply_tiles
from aserve.kernels.gpu.medium_linear_launch import MediumLinearLaunch
from aserve.kernels.gpu.small_linear import SmallLinear

ALIGNMENT = 16  # bytes, of where the copy engine's rows start
HOPPER = 9
SUM_BLOCK = 512  # outputs of one token that a program adds up


def can_multiply(x: Tensor, layer: SmallLinear) -> bool:
    """Whether the kernels serve the layer for x [T, in]: 16-bit floats, and rows that the copy engine can address.

    On Hopper only: launches that were measured there need its shared memory.
    """
    return (
        (not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] == HOPPER)
        and x.dtype.itemsize == 2
        and len(x) > 0
        and x.shape[1] * x.dtype.itemsize % ALIGNMENT == 0
        and all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (x, layer.weight))
    )


def apply_medium_linear(
    x: Tensor,
    layer: SmallLinear,
    result: Tensor,
    overlap: bool,
    launch: MediumLinearLaunch,
    *,
    compile_only: bool = False,
) -> None:
    """Write layer(x) to ``result`` [T, out], of any float dtype; x [T, in], see ``can_multiply``.

    ``compile_only``: make the kernels ready, launch nothing.
    """
    if launch.num_parts == 1:
        _multiply(x, layer, layer.num_outputs, result, overlap, launch, compile_only)
        return
    num_rows = len(layer.weight)
    parts = torch.empty(launch.num_parts, len(x), num_rows, dtype=torch.float32, device=x.device)
    _multiply(x, SmallLinear(layer.weight), num_rows, parts, overlap, launch, compile_only)
    add_parts.run(
        parts,
        layer.bias,
        result,
        len(x),
        layer.num_outputs,
        NUM_PARTS=launch.num_parts,
        IS_GATED=layer.is_gated,
        BLOCK=SUM_BLOCK,
        OVERLAP=overlap,
        num_warps=4,
        grid=(len(x), triton.cdiv(layer.num_outputs, SUM_BLOCK)),
        warmup=compile_only,
        **launch_options(overlap),
    )


def _multiply(
    x: Tensor,
    layer: SmallLinear,
    num_outputs: int,
    result: Tensor,
    overlap: bool,
    launch: MediumLinearLaunch,
    compile_only: bool,
) -> None:
    num_tokens, width = x.shape
    multiply_tiles.run(
        TensorDescriptor.from_tensor(layer.weight, [launch.block_outputs, launch.block_width]),
        layer.weight,
        TensorDescriptor.from_tensor(x, [launch.block_tokens, launch.block_width]),
        layer.bias,
        result,
        num_tokens,
        num_outputs,
        width,
        NUM_STEPS=triton.cdiv(triton.cdiv(width, launch.block_width), launch.num_parts),
        BLOCK_OUTPUTS=launch.block_outputs,
        BLOCK_TOKENS=launch.block_tokens,
        TOKEN_BLOCKS=launch.token_blocks,
        BLOCK_WIDTH=launch.block_width,
        IS_GATED=layer.is_gated,
        AHEAD=launch.ahead,
        OVERLAP=overlap,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        grid=(
            triton.cdiv(num_tokens, launch.block_tokens * launch.token_blocks),
            triton.cdiv(num_outputs, launch.block_outputs),
            launch.num_parts,
        ),
        warmup=compile_only,
        **launch_options(overlap),
    )
