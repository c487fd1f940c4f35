"""A linear layer with weights and neighbours, to time its kernels on a GPU as a step would run them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.kernels.gpu.gpu_operators import GpuOperators
from aserve.kernels.gpu.layer_case import DTYPE, EPS, LayerShape
from aserve.kernels.gpu.medium_linear import apply_medium_linear
from aserve.kernels.gpu.medium_linear_launch import MediumLinearLaunch
from aserve.kernels.gpu.replay_timer import num_cold_copies, time_calls
from aserve.kernels.gpu.small_linear import SmallLinear

MAX_ERROR = 0.01  # of the norm, between two results rounded to the activations' dtype


class MediumLinearCase:
    """Copies of one layer's weight, used in turn so that each comes from memory, with a norm before or behind each.

    The norm is that of the model: before the layer if it has one, else of what the layer adds to the residual stream.
    It is timed with the layer, since what lies between two kernels depends on both.
    """

    def __init__(self, shape: LayerShape, hidden_size: int, device: torch.device, overlap: bool) -> None:
        self._shape = shape
        self._num_bytes = shape.num_rows * shape.width * DTYPE.itemsize
        self._layers = [
            SmallLinear(
                torch.randn(shape.num_rows, shape.width, device=device, dtype=DTYPE).mul_(shape.width**-0.5),
                is_gated=shape.is_gated,
            )
            for _ in range(num_cold_copies(self._num_bytes))
        ]
        self._gain = torch.ones(hidden_size, device=device, dtype=DTYPE)
        self._operators = GpuOperators(overlap=overlap)
        self._overlap = overlap

    def time_launch(self, num_tokens: int, launch: MediumLinearLaunch) -> float:
        """Return the microseconds of norm and layer; fail if the layer computes something else than torch."""
        self._check(num_tokens, launch)
        return self._time(num_tokens, partial(self._multiply, launch=launch))

    def time_torch(self, num_tokens: int) -> float:
        """Return the microseconds of norm and layer as they are without the kernel."""
        return self._time(num_tokens, self._multiply_in_torch)

    def time_norm(self, num_tokens: int) -> float:
        """Return the microseconds of the norm alone."""
        x, residual = self._draw(num_tokens, len(self._gain)), self._draw(num_tokens, len(self._gain))
        return time_calls([partial(self._norm, x, residual) for _ in self._layers])

    def bandwidth(self, time_us: float) -> float:
        """Return GB/s of weight."""
        return self._num_bytes / time_us / 1e3

    def _time(self, num_tokens: int, multiply: Callable[[Tensor, SmallLinear], Tensor]) -> float:
        x, residual = self._draw(num_tokens, self._shape.width), self._draw(num_tokens, len(self._gain))
        return time_calls([partial(self._run, x, residual, layer, multiply) for layer in self._layers])

    def _run(
        self, x: Tensor, residual: Tensor, layer: SmallLinear, multiply: Callable[[Tensor, SmallLinear], Tensor]
    ) -> None:
        if self._shape.has_norm:
            multiply(self._norm(x, residual), layer)
        else:
            self._norm(multiply(x, layer), residual)

    def _norm(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._operators.add_rms_norm(x, residual, self._gain, EPS)[0]

    def _multiply(self, x: Tensor, layer: SmallLinear, launch: MediumLinearLaunch) -> Tensor:
        result = torch.empty(len(x), layer.num_outputs, device=x.device, dtype=self._result_dtype)
        apply_medium_linear(x, layer, result, self._overlap, launch)
        return result

    def _multiply_in_torch(self, x: Tensor, layer: SmallLinear) -> Tensor:
        if self._result_dtype == torch.float32:
            return torch.mm(x, layer.weight.t(), out_dtype=torch.float32)
        result = F.linear(x, layer.weight)
        return self._operators.silu_mul(result) if layer.is_gated else result

    @property
    def _result_dtype(self) -> torch.dtype:
        return torch.float32 if self._shape.name == "head" else DTYPE

    def _check(self, num_tokens: int, launch: MediumLinearLaunch) -> None:
        x, layer = self._draw(num_tokens, self._shape.width), self._layers[0]
        actual, expected = self._multiply(x, layer, launch).float(), self._multiply_in_torch(x, layer).float()
        error = float((actual - expected).norm() / expected.norm())
        if not error < MAX_ERROR:
            raise ArithmeticError(f"{launch} is wrong by {error:.1e} for {num_tokens} tokens of {self._shape}")

    def _draw(self, num_tokens: int, width: int) -> Tensor:
        return torch.randn(num_tokens, width, device=self._gain.device, dtype=DTYPE)
