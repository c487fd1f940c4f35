"""A paged pool with poison around it, and dense attention in float64 to compare with; knows no backend."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.attention.base import AttentionBatch, AttentionKind, AttentionProblem, AttentionSpec, LayerKV
from aserve.attention.torch_backend import TorchBackend


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
    return TorchBackend(make_problem(device), torch.device(device))


def make_case(
    spec: AttentionSpec,
    query_lens: list[int],
    key_lens: list[int],
    num_decodes: int,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> PagedCase:
    """Scatter random keys over shuffled pages; table entries past a sequence's own name a page full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-key_len // page_size) for key_len in key_lens]
    num_pages = sum(counts) + 3
    numbers = torch.randperm(num_pages, generator=generator).tolist()
    poison = numbers.pop()
    width = max(counts)
    page_table = torch.full((len(key_lens), width), poison, dtype=torch.int32)
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    key_pages, value_pages = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
    keys, values = [], []
    for i, key_len in enumerate(key_lens):
        pages = [numbers.pop() for _ in range(counts[i])]
        page_table[i, : counts[i]] = torch.tensor(pages)
        dense = torch.randn(2, key_len, spec.num_kv_heads, spec.head_dim, generator=generator).to(dtype)
        keys.append(dense[0])
        values.append(dense[1])
        for position in range(key_len):
            page, offset = pages[position // page_size], position % page_size
            key_pages[page, offset], value_pages[page, offset] = dense[0, position], dense[1, position]
    q = torch.randn(sum(query_lens), spec.num_heads, spec.head_dim, generator=generator).to(dtype)
    prefix = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = AttentionBatch(
        query_lens=query_lens,
        key_lens=key_lens,
        num_decodes=num_decodes,
        cu_query_lens=prefix.to(device),
        key_lens_device=torch.tensor(key_lens, dtype=torch.int32, device=device),
        page_table=page_table.to(device),
        page_size=page_size,
        cu_key_lens=torch.tensor([0, *key_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
    )
    return PagedCase(batch, LayerKV(key_pages.to(device), value_pages.to(device)), q.to(device), keys, values)


def dense_attention(case: PagedCase, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return output [T, H, D] and natural LSE [T, H], one query and one head at a time, in float64."""
    group = spec.num_heads // spec.num_kv_heads
    queries = case.q.double().cpu()
    outputs, lses = [], []
    token = 0
    for query_len, key_len, keys, values in zip(
        case.batch.query_lens, case.batch.key_lens, case.keys, case.values, strict=True
    ):
        keys, values = keys.double(), values.double()
        for position in range(key_len - query_len, key_len):
            first = 0 if spec.sliding_window is None else max(0, position + 1 - spec.sliding_window)
            row, row_lse = [], []
            for head in range(spec.num_heads):
                seen = slice(first, position + 1)
                scores = keys[seen, head // group] @ queries[token, head] * spec.scale
                if spec.softcap is not None:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                total = scores.exp().sum()
                if spec.sinks is not None:
                    total = total + spec.sinks[head].double().exp().cpu()
                row.append((scores.exp() / total) @ values[seen, head // group])
                row_lse.append(total.log())
            outputs.append(torch.stack(row))
            lses.append(torch.stack(row_lse))
            token += 1
    return torch.stack(outputs), torch.stack(lses)
