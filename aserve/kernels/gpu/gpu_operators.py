"""The small operators in Triton, for a GPU; what the kernels do not serve goes to the reference."""

import torch
from torch import Tensor

from aserve.kernels.experts import Experts
from aserve.kernels.gpu import gate_mul, norm, rope_store
from aserve.kernels.gpu.launch import can_run
from aserve.kernels.gpu.medium_linear import apply_medium_linear, can_multiply
from aserve.kernels.gpu.medium_linear_launch import MediumLinearLaunch, choose_medium_launch
from aserve.kernels.gpu.moe import can_run_moe, run_moe
from aserve.kernels.gpu.small_linear import NormBefore, SmallLinear, apply_small_linear, is_small
from aserve.kernels.operators import Activation, HeadLayout, HeadNorms, KVTarget, Operators, Projection


class GpuOperators(Operators):
    """One kernel each; for few tokens a linear layer and the norm before it are one kernel, too.

    For some tokens more it is a kernel that overlaps, where that was measured to be faster than torch's product.

    ``overlap``: let kernels start while the one before them still runs (programmatic dependent launch).
    """

    def __init__(self, *, overlap: bool = False) -> None:
        self._overlap = overlap

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not (_can_norm(x, None, weight) and x.shape[-1] <= norm.MAX_WIDTH):
            return super().rms_norm(x, weight, eps)
        return norm.rms_norm(x, weight, eps, self._overlap)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not (_can_norm(x, residual, weight) and x.shape[-1] <= norm.MAX_WIDTH):
            return super().add_rms_norm(x, residual, weight, eps)
        return norm.add_rms_norm(x, residual, weight, eps, self._overlap)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if not (can_run(gate_up) and gate_up.dim() == 2):
            return super().silu_mul(gate_up)
        return gate_mul.silu_mul(gate_up, self._overlap)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        if not (can_run(gate_up) and gate_up.dim() == 2):
            return super().gelu_mul(gate_up)
        return gate_mul.gelu_mul(gate_up, self._overlap)

    def rope_store(
        self,
        qkv: Tensor,
        heads: HeadLayout,
        norms: HeadNorms | None,
        cos_sin: Tensor,
        positions: Tensor,
        target: KVTarget,
    ) -> Tensor:
        if not (can_run(qkv) and rope_store.can_store(qkv, heads, norms, cos_sin, positions, target)):
            return super().rope_store(qkv, heads, norms, cos_sin, positions, target)
        return rope_store.rope_store(qkv, heads, norms, cos_sin, positions, target, self._overlap)

    def linear(self, x: Tensor, linear: Projection) -> Tensor:
        layer = _as_small(x, linear)
        if layer is not None:
            return self._apply(x, layer, None)[0]
        medium = _as_medium(x, linear)
        return super().linear(x, linear) if medium is None else self._multiply(x, *medium)

    def add_norm_linear(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, linear: Projection
    ) -> tuple[Tensor, Tensor]:
        layer = _as_small(x, linear)
        if layer is None or not _can_norm(x, residual, weight):
            return super().add_norm_linear(x, residual, weight, eps, linear)
        return self._apply(x, layer, NormBefore(weight, eps, residual))

    def add_norm_gate_up(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        linear: Projection,
        activation: Activation = "silu",
    ) -> tuple[Tensor, Tensor]:
        if activation != "silu":  # the kernels that join layer and gate know no other
            return super().add_norm_gate_up(x, residual, weight, eps, linear, activation)
        layer, medium = _as_small(x, linear, is_gated=True), _as_medium(x, linear, is_gated=True)
        if (layer is None and medium is None) or not _can_norm(x, residual, weight):
            return super().add_norm_gate_up(x, residual, weight, eps, linear)
        if layer is not None:
            return self._apply(x, layer, NormBefore(weight, eps, residual))
        assert medium is not None  # one of the two is there
        normed, residual = self.add_rms_norm(x, residual, weight, eps)
        return self._multiply(normed, *medium), residual

    def moe(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        if not can_run_moe(x, scores, experts):
            return super().moe(x, scores, experts)
        return run_moe(x, scores, experts, self._overlap)

    def norm_logits(
        self, x: Tensor, weight: Tensor, eps: float, linear: Projection, *, out: Tensor | None = None
    ) -> Tensor:
        dense, layer, medium = linear.dense_weight, _as_small(x, linear), _as_medium(x, linear)
        if out is not None and not (out.dtype == torch.float32 and out.is_contiguous()):
            return super().norm_logits(x, weight, eps, linear, out=out)
        if layer is not None and _can_norm(x, None, weight):
            logits = _empty_logits(x, layer.weight) if out is None else out
            apply_small_linear(x, layer, NormBefore(weight, eps), logits, self._overlap)
            return logits
        if medium is not None and _can_norm(x, None, weight):
            return self._multiply(self.rms_norm(x, weight, eps), *medium, dtype=torch.float32, out=out)
        if not (x.is_cuda and dense is not None and x.dtype == dense.dtype and x.dtype.itemsize == 2):
            return super().norm_logits(x, weight, eps, linear, out=out)
        logits = _empty_logits(x, dense) if out is None else out
        torch.mm(self.rms_norm(x, weight, eps), dense.t(), out_dtype=torch.float32, out=logits)
        return logits if linear.bias is None else logits.add_(linear.bias)

    def _apply(self, x: Tensor, layer: SmallLinear, norm_before: NormBefore | None) -> tuple[Tensor, Tensor]:
        result = torch.empty(len(x), layer.num_outputs, dtype=x.dtype, device=x.device)
        return result, apply_small_linear(x, layer, norm_before, result, self._overlap)

    def _multiply(
        self,
        x: Tensor,
        layer: SmallLinear,
        launch: MediumLinearLaunch,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return layer(x), in ``out`` if that is given."""
        if out is None:
            out = torch.empty(len(x), layer.num_outputs, dtype=dtype or x.dtype, device=x.device)
        apply_medium_linear(x, layer, out, self._overlap, launch)
        return out


def _as_small(x: Tensor, linear: Projection, *, is_gated: bool = False) -> SmallLinear | None:
    """Return the layer if the kernel for few tokens serves it for ``x``."""
    weight, bias = linear.dense_weight, linear.bias
    if weight is None or x.dim() != 2 or not is_small(len(x), weight.numel()):
        return None
    return SmallLinear(weight, bias, is_gated) if can_run(x, weight, *([] if bias is None else [bias])) else None


def _as_medium(
    x: Tensor, linear: Projection, *, is_gated: bool = False
) -> tuple[SmallLinear, MediumLinearLaunch] | None:
    """Return the layer and how to launch its kernel, if the one for some tokens is known to be faster for ``x``."""
    weight, bias = linear.dense_weight, linear.bias
    if weight is None or x.dim() != 2:
        return None
    layer = SmallLinear(weight, bias, is_gated)
    launch = choose_medium_launch(layer.num_outputs, x.shape[1], len(x), is_gated)
    if launch is None or not can_run(x, weight, *([] if bias is None else [bias])) or not can_multiply(x, layer):
        return None
    return layer, launch


def _can_norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> bool:
    """Whether kernels serve these; a weight may be of float32 beside other activations."""
    is_fitting = weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()
    return is_fitting and can_run(x, *([] if residual is None else [residual]))


def _empty_logits(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
