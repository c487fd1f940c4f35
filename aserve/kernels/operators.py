"""The small fused operators around attention and the linear layers, in plain torch.

A device with something faster subclasses ``Operators``; models get one instance as an argument and
never ask which. The compositions (``add_norm_linear`` and those after it) are the places where kernels can be joined.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.kernels.experts import SILU, Experts, choose_experts, sum_all_experts, sum_by_expert
from aserve.kernels.key_transform import KeyTransform
from aserve.kernels.nvfp4 import BlockScales, quantise, quantise_in_halves

Activation = Literal["silu", "gelu_tanh"]  # of the gate; GELU in its tanh approximation


class Projection(Protocol):
    """A linear layer, as operators see it."""

    @property
    def dense_weight(self) -> Tensor | None:
        """The weight [out, in] in the activations' dtype, None if it is kept in another form."""

    @property
    def bias(self) -> Tensor | None:
        """[out], in the activations' dtype."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``; x [T, in]."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """What the columns of a merged query-key-value projection mean: H query heads, then K key, then K value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over the channels of each query and key head, [D] each, of one dtype; see ``Operators.rms_norm``."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class KVTarget:
    """Where keys and values of a step go.

    Pages [pages, page_size, K, D] each; they may be a transposed view of [pages, K, page_size, D] in memory. Pages of
    an 8-bit dtype take values divided by the scales, numbers or float32 [K]. With block scales pages are of nvfp4.
    Keys are transformed before; how they are rounded then is the transform's matter, too.
    """

    key: Tensor
    value: Tensor
    slot_mapping: Tensor  # [T] int64
    key_scale: float | Tensor = 1.0
    value_scale: float | Tensor = 1.0
    block_scales: BlockScales | None = None
    key_transform: KeyTransform | None = None


class Operators:
    """Reference implementation for any device and dtype; norms accumulate in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight over the last dimension, in x's dtype.

        A weight of x's dtype is multiplied with the rounded norm; one in float32 before the only rounding.
        """
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return weight * x32.to(x.dtype) if weight.dtype == x.dtype else (x32 * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``(rms_norm(x + residual), x + residual)``; may reuse the inputs' memory."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up for gate_up [T, 2 * I] with the gate first; result [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up with GELU's tanh approximation; shapes as of ``silu_mul``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [T, H, D] and k [T, K, D]; cos_sin [max positions, D] float32, cosines in its first half.

        Pairs are (i, i + D/2), as in the transformers library. May write in place.
        """
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2]
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def store_kv(self, k: Tensor, v: Tensor, target: KVTarget) -> None:
        """Write k, v [T, K, D] to ``target``."""
        slots, blocks = target.slot_mapping, target.block_scales
        if blocks is None:
            _write(target.key, slots, _to_pages(k, target.key.dtype, target.key_scale))
            _write(target.value, slots, _to_pages(v, target.value.dtype, target.value_scale))
            return
        key_scale, value_scale = _per_head(target.key_scale), _per_head(target.value_scale)
        if target.key_transform is None or target.key_transform.feedback is None:
            new = quantise(k, key_scale), quantise(v, value_scale)
        else:
            feedback = target.key_transform.feedback
            new = quantise_in_halves(k.float() / key_scale, v.float() / value_scale, feedback)
        for pages, block_scales, (packed, new_scales) in zip(
            (target.key, target.value), (blocks.key, blocks.value), new, strict=True
        ):
            _write(pages, slots, packed)
            _write(block_scales, slots, new_scales)

    def linear(self, x: Tensor, linear: Projection) -> Tensor:
        """Return linear(x)."""
        return linear(x)

    def add_norm_linear(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, linear: Projection
    ) -> tuple[Tensor, Tensor]:
        """Return ``(linear(rms_norm(x + residual)), x + residual)``; without a residual x is the sum."""
        if residual is None:
            return self.linear(self.rms_norm(x, weight, eps), linear), x
        normed, residual = self.add_rms_norm(x, residual, weight, eps)
        return self.linear(normed, linear), residual

    def add_norm_gate_up(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        linear: Projection,
        activation: Activation = "silu",
    ) -> tuple[Tensor, Tensor]:
        """Return ``(silu_mul(linear(rms_norm(x + residual))), x + residual)``, or the same with ``gelu_mul``."""
        gate_up, residual = self.add_norm_linear(x, residual, weight, eps, linear)
        return self.silu_mul(gate_up) if activation == "silu" else self.gelu_mul(gate_up), residual

    def moe(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        """Return the weighted sum [T, hidden] of each token's experts, which the router's ``scores`` [T, E] choose."""
        choice = choose_experts(scores, experts.routing)
        add_up = sum_by_expert if x.device.type == "cpu" else sum_all_experts  # a GPU may be capturing
        return add_up(x, choice, experts.routing.num_experts, partial(self._apply_expert, experts))

    def norm_logits(
        self, x: Tensor, weight: Tensor, eps: float, linear: Projection, *, out: Tensor | None = None
    ) -> Tensor:
        """Return linear(rms_norm(x)) as float32 [N, V], in ``out`` if that is given."""
        logits = self.linear(self.rms_norm(x, weight, eps), linear)
        return logits.float() if out is None else out.copy_(logits)

    def rope_store(
        self,
        qkv: Tensor,
        heads: HeadLayout,
        norms: HeadNorms | None,
        cos_sin: Tensor,
        positions: Tensor,
        target: KVTarget,
    ) -> Tensor:
        """Norm and rotate the query and key heads of qkv [T, (H + 2K) * D], store keys and values, return q [T, H, D].

        Keys and the queries that are returned go through ``target``'s transform, if it has one.
        May write to ``qkv``; the result may be a view of it.
        """
        parts = qkv.view(len(qkv), -1, heads.head_dim)
        q, k, v = torch.split(parts, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
        if norms is not None:
            q, k = self.rms_norm(q, norms.query, norms.eps), self.rms_norm(k, norms.key, norms.eps)
        q, k = self.rope(q, k, cos_sin, positions)
        if target.key_transform is not None:
            q, k = target.key_transform.transform_queries(q), target.key_transform.transform_keys(k)
        self.store_kv(k, v, target)
        return q

    def _apply_expert(self, experts: Experts, x: Tensor, expert: int) -> Tensor:
        gate_up = experts.gate_up(x, expert)
        hidden = self.silu_mul(gate_up) if experts.swiglu == SILU else experts.swiglu(gate_up)
        return experts.down(hidden, expert)


def _write(pages: Tensor, slots: Tensor, stored: Tensor) -> None:
    if pages.is_contiguous():
        pages.view(-1, *pages.shape[2:])[slots] = stored
    else:
        pages[slots // pages.shape[1], slots % pages.shape[1]] = stored


def _per_head(scale: float | Tensor) -> float | Tensor:
    """Return a scale so that keys [T, K, D] can be divided by it."""
    return scale.view(-1, 1) if isinstance(scale, Tensor) else scale


def _to_pages(new: Tensor, dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    """Convert keys or values to the pool's dtype; 8-bit floats saturate, for their conversion makes NaN of overflow."""
    if dtype.itemsize > 1:
        return new.to(dtype)
    limit = torch.finfo(dtype).max
    return (new.float() / _per_head(scale)).clamp(-limit, limit).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
