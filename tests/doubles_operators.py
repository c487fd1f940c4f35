"""What the operators should compute, in float64 and written anew; and what they take."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.kernels.operators import HeadLayout, HeadNorms, KVTarget

EPS = 1e-5
POISON = 99.0
IS_INTERPRETED = not torch.cuda.is_available()
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2.5e-2 if IS_INTERPRETED else 1e-2}
"""Of the error's norm to the value's: some roundings to the dtype; Triton's interpreter cuts bfloat16 off instead."""


@dataclass(frozen=True)
class Dense:
    """A linear layer with a plain weight."""

    dense_weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense_weight, self.bias)


@dataclass(frozen=True)
class Packed:
    """A linear layer whose weight is kept in a form of its own."""

    inner: Dense
    dense_weight = None

    @property
    def bias(self) -> Tensor | None:
        return self.inner.bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Fail if ``actual``, computed in ``dtype``, is further from the float64 ``expected`` than rounding explains."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < TOLERANCES[dtype], f"relative error {error:.2e}"


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new tensors be NaN, or the largest integer, so that what is never written is noticed."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", lambda *size, **options: fill(empty(*size, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda like, **options: fill(empty_like(like, **options)))


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of the last dimension."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def linear64(x: Tensor, layer: Dense) -> Tensor:
    """x @ weight.T + bias."""
    product = x.double() @ layer.dense_weight.double().T
    return product if layer.bias is None else product + layer.bias.double()


def silu_mul64(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def gelu_mul64(gate_up: Tensor) -> Tensor:
    """The same with GELU's tanh approximation (Hendrycks and Gimpel 2016, section 2)."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


@dataclass(frozen=True)
class RopeCase:
    """A call of ``rope_store`` on poisoned pages; ``is_head_major`` keeps the heads of a page before its slots."""

    heads: HeadLayout
    page_size: int
    is_head_major: bool
    has_norms: bool
    dtype: torch.dtype
    page_dtype: torch.dtype
    num_tokens: int
    device: torch.device
    num_slots: int = 192
    max_position: int = 50
    scales: tuple[float, float] | tuple[Tensor, Tensor] = (1.0, 1.0)
    gain_dtype: torch.dtype | None = None  # of the norms; None: dtype

    def make(self) -> tuple[Tensor, HeadNorms | None, Tensor, Tensor, KVTarget]:
        """Draw (qkv, norms, cos_sin, positions, target)."""
        head_dim, options = self.heads.head_dim, {"device": self.device}
        width = (self.heads.num_heads + 2 * self.heads.num_kv_heads) * head_dim
        qkv = torch.randn(self.num_tokens, width, **options).to(self.dtype)
        gains = torch.randn(2, head_dim, **options).to(self.gain_dtype or self.dtype)
        angles = torch.rand(self.max_position, head_dim // 2, **options) * 6.3
        return (
            qkv,
            HeadNorms(gains[0], gains[1], EPS) if self.has_norms else None,
            torch.cat((angles.cos(), angles.sin()), dim=-1),
            torch.randint(self.max_position, (self.num_tokens,), **options),
            KVTarget(self._pages(), self._pages(), self._slots(), *self.scales),
        )

    def expect(
        self, qkv: Tensor, norms: HeadNorms | None, cos_sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [T, heads, D] as they are to be, in float64, not yet divided by scales."""
        num_heads, num_kv_heads = self.heads.num_heads, self.heads.num_kv_heads
        parts = qkv.double().view(self.num_tokens, -1, self.heads.head_dim)
        q, k, v = parts.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = norm64(q, norms.query), norm64(k, norms.key)
        cos, sin = cos_sin.double()[positions][:, None].chunk(2, dim=-1)
        return _rotate64(q, cos, sin), _rotate64(k, cos, sin), v

    def read(self, pages: Tensor, slots: Tensor) -> Tensor:
        """Return what ``pages`` hold at ``slots``, in float64; fail if any other slot was written."""
        values = pages.to(torch.float64).flatten(0, 1)
        untouched = torch.ones(len(values), dtype=torch.bool, device=self.device)
        untouched[slots] = False
        poison = torch.tensor(POISON).to(self.page_dtype).item()
        assert (values[untouched] == poison).all(), "a slot that is not in the mapping was written"
        return values[slots]

    def _pages(self) -> Tensor:
        num_pages, num_kv_heads = self.num_slots // self.page_size, self.heads.num_kv_heads
        inner = (num_kv_heads, self.page_size) if self.is_head_major else (self.page_size, num_kv_heads)
        pages = torch.full((num_pages, *inner, self.heads.head_dim), POISON, device=self.device).to(self.page_dtype)
        return pages.transpose(1, 2) if self.is_head_major else pages

    def _slots(self) -> Tensor:
        return torch.randperm(self.num_slots, device=self.device)[: self.num_tokens]


def _rotate64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
