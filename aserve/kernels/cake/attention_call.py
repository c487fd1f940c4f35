"""What every attention kernel of the family is called with, and the checks that they share."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aserve.kernels.nvfp4 import HEAD_GRAIN, BlockScales, element_bytes

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

    What is stored is divided by the scale of its kind: numbers, or float32 [K]. Where there are block scales, which lie
    in the same order, pages are nvfp4: bytes, half as wide.
    """

    keys: Tensor
    values: Tensor
    key_scale: float | Tensor = 1.0
    value_scale: float | Tensor = 1.0
    block_scales: BlockScales | None = None

    @property
    def per_word(self) -> int:
        """Elements that kernels read at once and take apart."""
        if self.block_scales is not None:
            return 8
        return 4 if self.keys.dtype == torch.int32 else 1

    def in_words(self) -> "KVPages":
        """Return pages of e4m3 as words of four, where rows are whole 16 bytes.

        For kernels that would read the values byte by byte otherwise, as products of single warps want them.
        """
        if self.keys.dtype != torch.float8_e4m3fn or self.keys.shape[3] % 16:
            return self
        return replace(self, keys=self.keys.view(torch.int32), values=self.values.view(torch.int32))

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys, values and the scales of their blocks as kernels get them."""
        blocks = self.block_scales
        if blocks is None:
            return self.keys, self.values, None, None
        return self.keys.view(torch.int32), self.values.view(torch.int32), blocks.key, blocks.value


def prefers_head_major(kv_dtype: torch.dtype) -> bool:
    """Whether pages are read faster where all tokens of a head lie together: with few bits a token's part is short."""
    return element_bytes(kv_dtype) <= 1


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
        if self.lse is not None and not _is_float32(self.lse, (num_tokens, num_heads)):
            raise ValueError(f"lse: must be contiguous float32 [{num_tokens}, {num_heads}]")
        if keys.shape != values.shape or keys.stride() != values.stride() or keys.dtype != values.dtype:
            raise ValueError("values: must be of the shape, strides and dtype of keys")
        width = head_dim if self.pages.block_scales is None else head_dim // 2
        if keys.shape[1] != page_size or keys.shape[3] != width or keys.stride(3) != 1:
            raise ValueError(f"keys: must be pages of [{page_size}, K, {width}] with dense heads")
        self._check_blocks()
        for scale in (self.pages.key_scale, self.pages.value_scale):
            if isinstance(scale, Tensor) != self.has_head_scales:
                raise ValueError("value_scale: must be one for each head where key_scale is")
            if isinstance(scale, Tensor) and not _is_float32(scale, keys.shape[2:3]):
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
        self._check_rules()

    def _check_rules(self) -> None:
        window, softcap, sinks, num_heads = self.rules.window, self.rules.softcap, self.rules.sinks, self.q.shape[1]
        if window is not None and window < 1:
            raise ValueError(f"window: must be 1 or more, the query's own key, not {window}")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap: must be positive, not {softcap}")
        if sinks is not None and not _is_float32(sinks, (num_heads,)):
            raise ValueError(f"sinks: must be contiguous float32 [{num_heads}], one for each head")

    def _check_blocks(self) -> None:
        if self.pages.block_scales is None:
            return
        keys, head_dim = self.pages.keys, self.q.shape[2]
        if head_dim % HEAD_GRAIN or keys.dtype != torch.uint8:
            raise ValueError(f"keys: nvfp4 stands in bytes, with a head_dim that is a multiple of {HEAD_GRAIN}")
        strides = tuple(stride // 8 for stride in keys.stride()[:3])
        for scales in (self.pages.block_scales.key, self.pages.block_scales.value):
            if scales.shape[:3] != keys.shape[:3] or scales.stride() != (*strides, 1):
                raise ValueError("block_scales: must lie as keys do, one for each 8 bytes")

    @property
    def constants(self) -> dict[str, Any]:
        """What every kernel is compiled for, by the names of its parameters."""
        page_stride, token_stride, head_stride, _ = self.pages.pointers[0].stride()
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
            "PER_WORD": self.pages.per_word,
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


def _is_float32(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether kernels may read ``tensor`` as float32 of ``shape`` that lie one after another."""
    return tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()
