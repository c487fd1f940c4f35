"""What every attention kernel of the family is called with, and the checks that they share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_PAGE_SIZE = 256


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """N sequences with one query each, or as ``cu_query_lens`` tells; int32 on the device, read there only.

    Queries are the last tokens of their sequence.
    """

    page_table: Tensor  # [R, W]; a row's entries past its keys are never read
    rows: Tensor  # [N] into page_table
    key_lens: Tensor  # [N] the queries' own keys included; at least 1 where there is a query
    page_size: int
    cu_query_lens: Tensor | None = None  # [N + 1] the token at which each sequence's queries start; None: one each


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values, [pages, page_size, K, D] each, of the same strides; elements of a head are contiguous.

    What is stored is divided by the scale of its kind: numbers, or float32 [K].
    """

    keys: Tensor
    values: Tensor
    key_scale: float | Tensor = 1.0
    value_scale: float | Tensor = 1.0


@dataclass(frozen=True, slots=True)
class ScoreRules:
    """What becomes of the product of a query and a key."""

    scale: float
    window: int | None = None  # keys that a query sees, itself included; None = all
    softcap: float | None = None
    sinks: Tensor | None = None  # [H] float32


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's queries [T, H, D], whose rows are dense, to ``out`` [T, H, D], contiguous; a token is a row of both.

    ``lse`` [T, H] float32, if there is one, gets the natural log-sum-exp, sinks included.
    """

    q: Tensor
    out: Tensor
    lse: Tensor | None
    pages: KVPages
    batch: PagedBatch
    rules: ScoreRules

    def check(self) -> None:
        """Raise ValueError, with the parameter's name, for what no kernel here serves."""
        num_tokens, num_heads, head_dim = self.q.shape
        keys, values, page_size = self.pages.keys, self.pages.values, self.batch.page_size
        if self.q.stride()[1:] != (head_dim, 1):
            raise ValueError(f"q: heads of a token must be dense, not of strides {self.q.stride()[1:]}")
        if self.out.shape != self.q.shape or not self.out.is_contiguous() or self.out.dtype != self.q.dtype:
            raise ValueError(f"out: must be contiguous, {tuple(self.q.shape)} in {self.q.dtype}, as q is")
        if self.lse is not None and not (self.lse.shape == self.q.shape[:2] and self.lse.is_contiguous()):
            raise ValueError(f"lse: must be contiguous, [{num_tokens}, {num_heads}]")
        if keys.shape != values.shape or keys.stride() != values.stride() or keys.dtype != values.dtype:
            raise ValueError("values: must be of the shape, strides and dtype of keys")
        if keys.shape[1] != page_size or keys.shape[3] != head_dim or keys.stride(3) != 1:
            raise ValueError(f"keys: must be pages of [{page_size}, K, {head_dim}] with dense heads")
        for scale in (self.pages.key_scale, self.pages.value_scale):
            if isinstance(scale, Tensor) != self.has_head_scales:
                raise ValueError("value_scale: must be one for each head where key_scale is")
            if isinstance(scale, Tensor) and not (scale.shape == keys.shape[2:3] and scale.dtype == torch.float32):
                raise ValueError(f"key_scale, value_scale: must be numbers or float32 [{keys.shape[2]}]")
        if num_heads % keys.shape[2]:
            raise ValueError(f"q: {num_heads} heads are no multiple of {keys.shape[2]} KV heads")
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page_size: must be 1 to {MAX_PAGE_SIZE}, not {page_size}")
        num_seqs, starts = num_tokens, self.batch.cu_query_lens
        if starts is not None:
            num_seqs = len(starts) - 1
        if len(self.batch.rows) != num_seqs or len(self.batch.key_lens) != num_seqs:
            source = "q" if starts is None else "cu_query_lens"
            raise ValueError(f"rows, key_lens: must be of {num_seqs} sequences, as {source} is")
        if self.batch.page_table.stride(1) != 1:
            raise ValueError("page_table: entries of a row must be dense")

    @property
    def constants(self) -> dict[str, Any]:
        """What every kernel is compiled for, by the names of its parameters."""
        page_stride, token_stride, head_stride, _ = self.pages.keys.stride()
        return {
            "GROUP": self.group,
            "HEAD_DIM": self.q.shape[2],
            "Q_STRIDE": self.q.stride(0),
            "PAGE_STRIDE": page_stride,
            "TOKEN_STRIDE": token_stride,
            "HEAD_STRIDE": head_stride,
            "PAGE_SIZE": self.batch.page_size,
            "HAS_SOFTCAP": self.rules.softcap is not None,
            "HAS_SINKS": self.rules.sinks is not None,
            "WRITES_LSE": self.lse is not None,
            "HAS_HEAD_SCALES": self.has_head_scales,
        }

    @property
    def has_head_scales(self) -> bool:
        """Whether the scales are tensors."""
        return isinstance(self.pages.key_scale, Tensor)

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.pages.keys.shape[2]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.num_kv_heads
