"""int8 weights, one scale per output channel, and activations quantised per 32 values, in C.

The layout and the arithmetic are described in ``aserve/kernels/cpu/int8_linear.c``.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.kernels.cpu.bindings import CpuKernels, cpu_kernels
from aserve.quantization.base import QuantMethod

GROUP = 32  # activations that share a scale; inputs are padded to a multiple
BLOCK = 16  # channels that stand together in memory; outputs are padded to a multiple
QUAD = 4  # inputs of one channel that stand together
ROWS_AT_ONCE = 4096  # bounds the float32 copies made while packing; a multiple of BLOCK


class Int8Cpu(QuantMethod):
    """Sums are exact integers within a group and float32 between groups, in a fixed order.

    Packed: "weight" uint8 [out / BLOCK, in / QUAD, BLOCK, QUAD], w + 128, padded; "scale" float32 [out]; "num_inputs"
    int64, without the padding.
    """

    name = "int8_cpu"
    layout = "int8_cpu-1"

    def __init__(self, kernels: CpuKernels | None = None) -> None:
        self._kernels = kernels or cpu_kernels()

    def pack(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        blocks = [_quantize(block) for block in torch.split(weight, ROWS_AT_ONCE)]
        return {
            "weight": torch.cat([block for block, _ in blocks]),
            "scale": torch.cat([scale for _, scale in blocks]),
            "num_inputs": torch.tensor(weight.shape[1]),
        }

    def apply(self, x: Tensor, packed: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        if x.dtype != torch.float32:
            return self.apply(x.float(), packed, None if bias is None else bias.float()).to(x.dtype)
        row_stride, step = x.stride()
        if step != 1:
            x = x.contiguous()
            row_stride = x.stride(0)
        scale = packed["scale"]
        num_rows, num_inputs = x.shape
        num_channels = scale.shape[0]
        result = torch.empty(num_rows, num_channels)
        failed = self._kernels.long.int8_linear(
            self._kernels.pool(),
            x.data_ptr(),
            row_stride,
            num_rows,
            num_inputs,
            packed["weight"].data_ptr(),
            scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            result.data_ptr(),
            num_channels,
        )
        if failed:
            raise MemoryError(f"no memory to quantise {num_rows} x {num_inputs} activations")
        return result

    def rows(self, packed: Mapping[str, Tensor], row_ids: Tensor, dtype: torch.dtype) -> Tensor:
        scale, row_ids = packed["scale"], row_ids.contiguous()
        if len(row_ids) and not 0 <= int(row_ids.min()) <= int(row_ids.max()) < len(scale):
            raise IndexError(f"row ids must be between 0 and {len(scale) - 1}")
        num_inputs = int(packed["num_inputs"])
        result = torch.empty(len(row_ids), num_inputs)
        self._kernels.brief.int8_rows(
            packed["weight"].data_ptr(),
            scale.data_ptr(),
            row_ids.data_ptr(),
            len(row_ids),
            num_inputs,
            result.data_ptr(),
        )
        return result.to(dtype)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks of ``weight`` [out, in] and the scales [out]."""
    weight = weight.float()
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    whole = (weight / scale.unsqueeze(1)).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    whole = F.pad(whole, (0, -weight.shape[1] % GROUP, 0, -weight.shape[0] % BLOCK), value=128)
    return whole.view(-1, BLOCK, whole.shape[1] // QUAD, QUAD).transpose(1, 2).contiguous(), scale
