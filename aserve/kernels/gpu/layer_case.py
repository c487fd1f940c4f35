"""Linear layers of the built-in models, with weights to time them on a GPU."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.builtin_models import BUILTIN_MODELS
from aserve.kernels.gpu.replay_timer import num_cold_copies, time_calls
from aserve.kernels.gpu.small_linear import NormBefore, SmallLinear, apply_small_linear
from aserve.kernels.gpu.small_linear_launch import SmallLinearLaunch
from aserve.kernels.operators import HeadLayout, Operators

EPS = 1e-6
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A linear layer: the columns of its result and of its input, and what is fused with it."""

    name: str
    num_outputs: int
    width: int
    has_norm: bool = False
    is_gated: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the weight."""
        return self.num_outputs * (2 if self.is_gated else 1)


def head_layout(model: str) -> HeadLayout:
    """Return the heads of a built-in model."""
    config = BUILTIN_MODELS[model]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return HeadLayout(num_heads, config["num_key_value_heads"], head_dim)


def model_layers(model: str) -> list[LayerShape]:
    """Return the linear layers of a decoder layer but its experts, then the head."""
    config, heads = BUILTIN_MODELS[model], head_layout(model)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    mlp = (
        [LayerShape("router", num_experts, hidden)]
        if num_experts
        else [LayerShape("gate_up", inner, hidden, has_norm=True, is_gated=True), LayerShape("down", hidden, inner)]
    )
    return [
        LayerShape("qkv", query + 2 * key, hidden, has_norm=True),
        LayerShape("o", hidden, query),
        *mlp,
        LayerShape("head", config["vocab_size"], hidden, has_norm=True),
    ]


class LayerCase:
    """Copies of one layer's weight, used in turn so that each comes from memory."""

    def __init__(self, shape: LayerShape, device: torch.device) -> None:
        self._shape = shape
        self._num_bytes = shape.num_rows * shape.width * DTYPE.itemsize
        self._weights = [
            torch.randn(shape.num_rows, shape.width, device=device, dtype=DTYPE).mul_(shape.width**-0.5)
            for _ in range(num_cold_copies(self._num_bytes))
        ]
        self._gain = torch.ones(shape.width, device=device, dtype=DTYPE)

    def time_fused(self, num_tokens: int, overlap: bool, launch: SmallLinearLaunch | None = None) -> float:
        """Return the microseconds of the kernel for few tokens; None launches as the engine would."""
        x, residual = self._draw_inputs(num_tokens)
        calls = [partial(self._run_fused, x, residual, weight, overlap, launch) for weight in self._weights]
        return time_calls(calls)

    def time_composed(self, num_tokens: int, operators: Operators) -> float:
        """Return the microseconds of torch's matrix product, with ``operators`` around it."""
        x, residual = self._draw_inputs(num_tokens)
        return time_calls([partial(self._run_composed, x, residual, weight, operators) for weight in self._weights])

    def bandwidth(self, time_us: float) -> float:
        """Return GB/s of weight."""
        return self._num_bytes / time_us / 1e3

    def _draw_inputs(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(2, num_tokens, self._shape.width, device=self._gain.device, dtype=DTYPE)
        return inputs[0], inputs[1]

    def _run_fused(
        self, x: Tensor, residual: Tensor, weight: Tensor, overlap: bool, launch: SmallLinearLaunch | None
    ) -> None:
        shape = self._shape
        norm = NormBefore(self._gain, EPS, residual) if shape.has_norm else None
        result = torch.empty(len(x), shape.num_outputs, device=x.device, dtype=DTYPE)
        apply_small_linear(x, SmallLinear(weight, None, shape.is_gated), norm, result, overlap, launch)

    def _run_composed(self, x: Tensor, residual: Tensor, weight: Tensor, operators: Operators) -> None:
        if self._shape.has_norm:
            x, _ = operators.add_rms_norm(x, residual, self._gain, EPS)
        result = F.linear(x, weight)
        if self._shape.is_gated:
            operators.silu_mul(result)
