"""A paged pool with poison around it, and dense attention in float64 to compare with."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from aserve.attention.base import (
    AttentionBatch,
    AttentionKind,
    AttentionProblem,
    AttentionSpec,
    CaptureShape,
    LayerKV,
    StepLens,
    StepTables,
)
from aserve.attention.torch_backend import TorchBackend
from aserve.kernels.nvfp4 import NVFP4, BlockScales

# OCP Microscaling Formats 1.0, section 5.3.3: FP4 E2M1, by the bits of an element.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


MAX_ERRORS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}  # of an output, relative
MAX_LSE_ERRORS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}  # absolute


@dataclass
class PagedCase:
    """A step's batch, its pool (NaN wherever no sequence has a key) and each sequence's dense keys and values."""

    batch: AttentionBatch
    layer_kv: LayerKV
    q: Tensor  # [T, H, D]
    keys: list[Tensor]  # [L, K, D] of each sequence
    values: list[Tensor]


def make_spec(num_heads: int, num_kv_heads: int, head_dim: int, **options: object) -> AttentionSpec:
    return AttentionSpec(0, num_heads, num_kv_heads, head_dim, head_dim**-0.5, **options)  # type: ignore[arg-type]


def make_problem(device: str = "cpu", dtype: torch.dtype = torch.float32, **kind: object) -> AttentionProblem:
    """The demo model's problem; ``kind`` changes the one kind of its layers."""
    fields = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "scale": 0.125} | kind
    return AttentionProblem(device, dtype, dtype, 16, (AttentionKind(**fields),))  # type: ignore[arg-type]


def torch_backend(device: str = "cpu") -> TorchBackend:
    """The oracle; it plans nothing by kind, so one problem is as good as another."""
    problem = replace(make_problem(device), max_num_seqs=64, max_model_len=512)
    return TorchBackend(problem, torch.device(device))


def make_case(
    spec: AttentionSpec,
    query_lens: list[int],
    key_lens: list[int],
    num_decodes: int,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    scales: tuple[float, float] | tuple[Tensor, Tensor] = (1.0, 1.0),
    num_pages: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> PagedCase:
    """Scatter random keys over shuffled pages; table entries past a sequence's own name a page full of NaN.

    With ``num_pages`` the pool has so many and the case takes the highest. ``scales`` are those of keys and values,
    numbers or [K].
    """
    generator = torch.Generator(device).manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    counts = [-(-key_len // page_size) for key_len in key_lens]
    used = sum(counts) + 3
    pool_size = num_pages or used
    numbers = pool_size - used + torch.randperm(used, generator=generator, device=device)
    poison, numbers = numbers[-1], numbers[:-1]
    page_table = poison.expand(len(key_lens), max(counts)).to(torch.int32, copy=True)
    inner = (spec.num_kv_heads, spec.head_dim)
    poison_rows, _ = _draw_rows(1, inner, kv_dtype, 1.0, generator)
    pools = [
        [_poison((pool_size, page_size, *rows.shape[1:]), rows.dtype, device) for rows in poison_rows] for _ in range(2)
    ]
    dense: tuple[list[Tensor], list[Tensor]] = ([], [])
    first = 0
    for i, key_len in enumerate(key_lens):
        pages = numbers[first : first + counts[i]]
        first += counts[i]
        page_table[i, : counts[i]] = pages
        for pool, scale, tensors in zip(pools, scales, dense, strict=True):
            stored, values = _draw_rows(key_len, inner, kv_dtype, scale, generator)
            for part, rows in zip(pool, stored, strict=True):
                padded = _poison((counts[i] * page_size, *rows.shape[1:]), rows.dtype, device)
                padded[:key_len] = rows
                bits = padded.view(-1, *part.shape[1:]).view(torch.uint8)
                part.view(torch.uint8)[pages] = bits  # floats of 8 bits know little
            tensors.append(values.to(dtype))
    q = torch.randn(sum(query_lens), spec.num_heads, spec.head_dim, generator=generator, device=device).to(dtype)
    batch = AttentionBatch(
        query_lens=query_lens,
        key_lens=key_lens,
        num_decodes=num_decodes,
        cu_query_lens=prefix_sum(query_lens).to(device),
        key_lens_device=torch.tensor(key_lens, dtype=torch.int32, device=device),
        page_table=page_table,
        page_size=page_size,
        cu_key_lens=prefix_sum(key_lens).to(device),
    )
    (keys, *key_blocks), (values, *value_blocks) = pools
    blocks = BlockScales(key_blocks[0], value_blocks[0]) if key_blocks else None
    return PagedCase(batch, LayerKV(keys, values, *scales, blocks), q, *dense)


def _poison(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """NaN, or for bytes of nvfp4, which has none, what is largest."""
    if dtype == torch.uint8:
        return torch.full(shape, 0x77, dtype=dtype, device=device)
    return torch.full(shape, math.nan, device=device).to(dtype)


def _draw_rows(
    num_rows: int, inner: tuple[int, int], kv_dtype: torch.dtype, scale: float | Tensor, generator: torch.Generator
) -> tuple[list[Tensor], Tensor]:
    """Return rows as pages hold them, nvfp4's elements and scales of blocks apart, and what they stand for."""
    device = generator.device
    factor = scale.view(-1, 1) if isinstance(scale, Tensor) else scale
    if kv_dtype != NVFP4:
        stored = (torch.randn(num_rows, *inner, generator=generator, device=device) / factor).to(kv_dtype)
        return [stored], stored.float() * factor
    num_heads, head_dim = inner
    codes = torch.randint(16, (num_rows, *inner), generator=generator, device=device)
    sizes = 0.05 + torch.rand(num_rows, num_heads, head_dim // 16, generator=generator, device=device)
    block_scales = (sizes / factor).to(torch.float8_e4m3fn)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    values = E2M1.to(device)[codes] * block_scales.float().repeat_interleave(16, dim=-1) * factor
    return [packed, block_scales], values


def prefix_sum(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def dense_attention(case: PagedCase, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return output [T, H, D] and natural LSE [T, H] on the CPU, from dense keys, computed in float64."""
    outputs, lses = [], []
    batch, start = case.batch, 0
    for query_len, key_len, keys, values in zip(batch.query_lens, batch.key_lens, case.keys, case.values, strict=True):
        for first in range(0, query_len, 256):
            stop = min(first + 256, query_len)
            positions = torch.arange(key_len - query_len + first, key_len - query_len + stop, device=keys.device)
            output, lse = _attend_densely(case.q[start + first : start + stop], keys, values, positions, spec)
            outputs.append(output.cpu())
            lses.append(lse.cpu())
        start += query_len
    return torch.cat(outputs), torch.cat(lses)


def check_attention(output: Tensor, lse: Tensor | None, case: PagedCase, spec: AttentionSpec) -> tuple[float, float]:
    """Hold ``output`` [T, H, D] and natural ``lse`` [T, H] against dense attention; return their largest errors.

    An output counts relative to its token's norm: the more keys there are, the smaller it is, and the less it shows
    that some are left out.
    """
    expected, expected_lse = dense_attention(case, spec)
    errors = (output.double().cpu() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    error, lse_error = errors.max().item(), 0.0
    assert error <= MAX_ERRORS[output.dtype], f"an output is off by {error:.2e} of its norm"
    if lse is not None:
        lse_error = (lse.double().cpu() - expected_lse).abs().max().item()
        assert lse_error <= MAX_LSE_ERRORS[output.dtype], f"a log-sum-exp is off by {lse_error:.2e}"
    return error, lse_error


def _attend_densely(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (tensor.double().repeat_interleave(group, dim=1) for tensor in (keys, values))  # [L, H, D]
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    distance = positions.view(-1, 1) - torch.arange(len(keys), device=keys.device)  # of a key before a query
    is_seen = distance >= 0 if spec.sliding_window is None else (distance >= 0) & (distance < spec.sliding_window)
    total = (scores.exp() * is_seen).sum(-1)  # [H, Q]
    if spec.sinks is not None:
        total = total + spec.sinks.double().exp().view(-1, 1)
    output = torch.einsum("hqk,khd->qhd", scores.exp() * is_seen / total.unsqueeze(-1), values)
    return output, total.log().T


@dataclass
class CapturedCase:
    """The tables that a captured forward reads, with room for ``shape``, and what the runner would write to them."""

    shape: CaptureShape
    tables: StepTables

    @classmethod
    def make(cls, shape: CaptureShape, width: int, page_size: int, device: str = "cpu") -> "CapturedCase":
        num_seqs = shape.num_decodes + shape.num_chunks

        def dirt(*size: int) -> Tensor:
            return torch.full(size, 7, dtype=torch.int32, device=device)

        tables = StepTables(
            dirt(num_seqs + 1, width), dirt(num_seqs), dirt(num_seqs), dirt(shape.num_chunks + 1), page_size
        )
        return cls(shape, tables)

    def fill(self, case: PagedCase, dummy_page: int) -> StepLens:
        """Write the tables for the step of ``case``, whose rows stand in the table in reverse."""
        batch, tables, shape = case.batch, self.tables, self.shape
        num_decodes, num_seqs = batch.num_decodes, len(batch.key_lens)
        dummy_row, num_chunks = len(tables.page_table) - 1, num_seqs - num_decodes
        assert num_decodes <= shape.num_decodes
        assert num_chunks <= shape.num_chunks
        assert sum(batch.query_lens) <= shape.num_tokens
        tables.page_table.fill_(dummy_page)
        places = torch.arange(dummy_row - 1, dummy_row - 1 - num_seqs, -1, device=tables.rows.device)
        tables.page_table[places, : batch.page_table.shape[1]] = batch.page_table
        rows = torch.full((shape.num_decodes + shape.num_chunks,), dummy_row, dtype=torch.int32)
        key_lens = np.array([1] * shape.num_decodes + [0] * shape.num_chunks, np.int32)
        places = places.cpu()
        for first, count, start in ((0, num_decodes, 0), (shape.num_decodes, num_chunks, num_decodes)):
            rows[first : first + count] = places[start : start + count]
            key_lens[first : first + count] = batch.key_lens[start : start + count]
        starts = num_decodes + prefix_sum(batch.query_lens[num_decodes:] + [0] * (shape.num_chunks - num_chunks))
        tables.rows.copy_(rows)
        tables.key_lens.copy_(torch.from_numpy(key_lens))
        tables.cu_query_lens.copy_(starts)
        return StepLens(key_lens, starts.numpy())
