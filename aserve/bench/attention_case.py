"""One step of attention over a paged pool, with the dense reference to hold a backend against."""

import random
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.attention.base import (
    AttentionBatch,
    AttentionKind,
    AttentionProblem,
    AttentionSpec,
    KVOrder,
    LayerKV,
    Phase,
)
from aserve.kernels.cake.case_pages import draw_pages
from aserve.kernels.nvfp4 import BlockScales, dequantise, element_bytes

SHAPE = re.compile(r"(\d+)x(\d+)(?:\.\.(\d+))?(?:\+(\d+))?")
MAX_SCORES = 1 << 26  # float32 scores held at once by the reference: 256 MiB
SEED = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """``batch`` sequences, each computing ``query_len`` tokens behind ``cached_len`` that are there already.

    With ``spread`` the cached lengths are even steps from ``cached_len`` to as many more, in random order.
    """

    phase: Phase
    batch: int
    query_len: int
    cached_len: int
    spread: int = 0

    @classmethod
    def parse(cls, phase: Phase, text: str) -> "StepShape":
        """Read "128x1024" or, for decode, "128x1..2047".

        For decode these are the keys of each sequence, for prefill its new tokens, perhaps "+cached". Raises ValueError
        for anything else.
        """
        match = SHAPE.fullmatch(text)
        batch, length, longest, cached = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
        is_range, has_cached = ".." in text, "+" in text
        if (
            not batch
            or not length
            or (is_range and longest < length)
            or (has_cached if phase == "decode" else is_range)
        ):
            wanted = "BATCHxKEYS or BATCHxLEAST..MOST" if phase == "decode" else "BATCHxTOKENS or BATCHxTOKENS+CACHED"
            raise ValueError(f"{text!r} is not {wanted}")
        if phase == "decode":
            return cls(phase, batch, 1, length - 1, longest - length if is_range else 0)
        return cls(phase, batch, length, cached)

    @property
    def key_lens(self) -> list[int]:
        """Keys of each sequence, with those of this step."""
        shortest, steps = self.cached_len + self.query_len, max(self.batch - 1, 1)
        lens = [shortest + self.spread * place // steps for place in range(self.batch)]
        random.Random(SEED).shuffle(lens)
        return lens

    @property
    def max_key_len(self) -> int:
        """Keys of the longest sequence."""
        return max(self.key_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.batch * self.query_len

    def __str__(self) -> str:
        if self.phase == "decode":
            shortest = self.cached_len + 1
            return f"{self.batch}x{shortest}" + (f"..{shortest + self.spread}" if self.spread else "")
        return f"{self.batch}x{self.query_len}" + (f"+{self.cached_len}" if self.cached_len else "")


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """What the cases of a run have in common."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def spec(self) -> AttentionSpec:
        """A plain layer."""
        return AttentionSpec(0, self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)

    def problem(self, shape: StepShape) -> AttentionProblem:
        """What a backend is asked at start."""
        spec = self.spec
        kind = AttentionKind(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale)
        is_cuda = self.device.type == "cuda"
        return AttentionProblem(
            device_type=self.device.type,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            kinds=(kind,),
            capability=torch.cuda.get_device_capability(self.device) if is_cuda else (0, 0),
            gpu_name=torch.cuda.get_device_name(self.device) if is_cuda else "",
            max_num_seqs=shape.batch,
            max_num_tokens=shape.num_tokens,
            max_model_len=shape.max_key_len,
        )

    def moved_bytes(self, shape: StepShape) -> int:
        """Bytes that no kernel can save: queries and output once, every key and value once."""
        queries = 2 * shape.num_tokens * self.num_heads * self.head_dim * self.dtype.itemsize
        keys = 2 * sum(shape.key_lens) * self.num_kv_heads * self.head_dim * element_bytes(self.kv_dtype)
        return queries + int(keys)

    def operations(self, shape: StepShape) -> int:
        """Multiplications and additions of both matrix products, hidden keys left out."""
        seen = sum(sum(range(key_len - shape.query_len + 1, key_len + 1)) for key_len in shape.key_lens)
        return 4 * seen * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Queries [T, H, D] and pages in random order."""

    setup: AttentionSetup
    batch: AttentionBatch
    queries: Tensor
    layer_kv: LayerKV

    def in_order(self, order: KVOrder) -> LayerKV:
        """Return the pages as they lie in the memory of a pool of ``order``, in memory of their own."""
        copy = _token_first if order == "NHD" else _head_first
        blocks = self.layer_kv.block_scales
        copied = None if blocks is None else BlockScales(copy(blocks.key), copy(blocks.value))
        return LayerKV(copy(self.layer_kv.key), copy(self.layer_kv.value), block_scales=copied)

    def reference(self) -> Tensor:
        """Return the output [T, H, D] computed in float32 from the same rounded inputs, densely, in plain torch."""
        outputs, start = [], 0
        blocks = self.layer_kv.block_scales
        key_blocks, value_blocks = (None, None) if blocks is None else (blocks.key, blocks.value)
        for seq, (query_len, key_len) in enumerate(zip(self.batch.query_lens, self.batch.key_lens, strict=True)):
            keys = self._gather(self.layer_kv.key, key_blocks, seq, key_len)
            values = self._gather(self.layer_kv.value, value_blocks, seq, key_len)
            queries = self.queries[start : start + query_len].float()
            outputs.append(_attend(queries, keys, values, self.setup))
            start += query_len
        return torch.cat(outputs)

    def _gather(self, pool: Tensor, block_scales: Tensor | None, seq: int, key_len: int) -> Tensor:
        """Return [L, K, D] float32 of one sequence."""
        pages = self.batch.page_table[seq].long()
        if block_scales is not None:
            return dequantise(_take(pool, pages), _take(block_scales, pages)).flatten(0, 1)[:key_len]
        return _take(pool, pages).flatten(0, 1)[:key_len].float()


def _take(pool: Tensor, pages: Tensor) -> Tensor:
    return pool.view(torch.uint8)[pages].view(pool.dtype)  # float8 tensors cannot be indexed


def _token_first(pool: Tensor) -> Tensor:
    return pool.clone(memory_format=torch.contiguous_format)  # whatever order was drawn


def _head_first(pool: Tensor) -> Tensor:
    """Return a copy of ``pool`` with the same axes in which a head's tokens lie together."""
    return pool.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, setup: AttentionSetup) -> Tensor:
    num_queries, num_keys, group = len(queries), len(keys), setup.num_heads // setup.num_kv_heads
    block = max(1, MAX_SCORES // (setup.num_heads * num_keys))
    outputs = []
    for first in range(0, num_queries, block):
        part = queries[first : first + block]
        last_keys = torch.arange(first, first + len(part), device=part.device) + num_keys - num_queries
        grouped = part.view(len(part), setup.num_kv_heads, group, setup.head_dim).permute(1, 2, 0, 3)  # [K, G, B, D]
        scores = grouped @ keys.permute(1, 2, 0).unsqueeze(1) * setup.spec.scale
        is_hidden = torch.arange(num_keys, device=part.device) > last_keys.unsqueeze(1)
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
        output = weights @ values.permute(1, 0, 2).unsqueeze(1)  # [K, G, B, D]
        outputs.append(output.permute(2, 0, 1, 3).reshape(len(part), setup.num_heads, setup.head_dim))
    return torch.cat(outputs)


def make_case(setup: AttentionSetup, shape: StepShape) -> AttentionCase:
    """Draw a case, the same each time."""
    generator = torch.Generator(setup.device).manual_seed(SEED)
    width = -(-shape.max_key_len // setup.page_size)
    num_pages = shape.batch * width

    pages = torch.randperm(num_pages, generator=generator, device=setup.device).to(torch.int32)
    pool_size = (num_pages, setup.page_size, setup.num_kv_heads, setup.head_dim)
    lens = {"query": [shape.query_len] * shape.batch, "key": shape.key_lens}
    starts = {
        name: torch.tensor([0, *values], device=setup.device).cumsum(0, dtype=torch.int32)
        for name, values in lens.items()
    }
    batch = AttentionBatch(
        query_lens=lens["query"],
        key_lens=lens["key"],
        num_decodes=shape.batch if shape.phase == "decode" else 0,
        cu_query_lens=starts["query"],
        key_lens_device=torch.tensor(lens["key"], dtype=torch.int32, device=setup.device),
        page_table=pages.view(shape.batch, width),
        page_size=setup.page_size,
        cu_key_lens=starts["key"] if shape.cached_len else starts["query"],
    )
    query_size = (shape.num_tokens, setup.num_heads, setup.head_dim)
    queries = torch.randn(query_size, generator=generator, device=setup.device).to(setup.dtype)
    drawn = draw_pages(pool_size, setup.kv_dtype, generator)
    return AttentionCase(setup, batch, queries, LayerKV(drawn.keys, drawn.values, block_scales=drawn.block_scales))
