"""Each row of the cake family against FlashInfer's paged wrappers: a second opinion that shares no code with ours."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from doubles_attention import PagedCase, make_case, make_spec
from torch import Tensor

from aserve.attention.base import AttentionProblem, AttentionSpec
from aserve.attention.cake_backend import CakeBackend
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, SEVERAL_VARIANTS, DecodeVariant
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS, PrefillVariant

pytestmark = pytest.mark.gpu
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
GROUP, NUM_KV_HEADS, PAGE_SIZE = 4, 2, 16
WORKSPACE_BYTES = 256 << 20
MAX_ERROR = 1e-2  # of each sequence's output, by its norm; both round to bfloat16 on the way and at the end

DECODE_LENS = {
    "full blocks": [128, 256, 1024, 8192, 40_000 // 128 * 128],
    "all tails": [key_len for key_len in range(1, 258, 5) if key_len % PAGE_SIZE],
    "mixed": [1, 15, 16, 17, 127, 128, 129, 4096, 40_000, 300, 3],
}
CHUNKS = ([1, 15, 16, 17, 300, 128, 64, 1], [1, 15, 33, 4096, 300, 1024, 40_000, 70])  # of queries, of keys
DRAFTS = ([1, 6, 2, 6, 3, 6], [1, 6, 129, 4096, 40_000, 1024])


@dataclass(frozen=True, slots=True)
class FlashInferCase:
    """A step as FlashInfer's wrappers take it; pages of nvfp4, and of heads it has no kernel for, in bfloat16."""

    case: PagedCase
    spec: AttentionSpec
    pages: tuple[Tensor, Tensor]
    scales: dict[str, Any]

    @classmethod
    def of(cls, case: PagedCase, spec: AttentionSpec) -> "FlashInferCase":
        kv = case.layer_kv
        if kv.key.dtype == BF16 or (kv.key.dtype == FP8 and spec.head_dim in (64, 128)):
            scales = {} if kv.key.dtype == BF16 else {"k_scale": kv.key_scale, "v_scale": kv.value_scale}
            return cls(case, spec, (kv.key, kv.value), scales)
        shape = (len(kv.key), PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        pages = tuple(torch.full(shape, torch.nan, dtype=BF16, device="cuda") for _ in range(2))
        for pool, dense in zip(pages, (case.keys, case.values), strict=True):
            for numbers, rows in zip(case.batch.page_table, dense, strict=True):
                places = torch.arange(len(rows), device="cuda")
                pool[numbers[places // PAGE_SIZE].long(), places % PAGE_SIZE] = rows
        return cls(case, spec, (pages[0], pages[1]), {})

    def attend(self) -> Tensor:
        """Return the output [T, H, D]."""
        import flashinfer

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        batch, spec = self.case.batch, self.spec
        counts = [-(-key_len // PAGE_SIZE) for key_len in batch.key_lens]
        starts = torch.tensor([0, *counts]).cumsum(0).to("cuda", torch.int32)
        indices = torch.cat([row[:count] for row, count in zip(batch.page_table, counts, strict=True)])
        last_lens = torch.tensor([(key_len - 1) % PAGE_SIZE + 1 for key_len in batch.key_lens], dtype=torch.int32)
        window = -1 if spec.sliding_window is None else spec.sliding_window - 1
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE_SIZE)
        options = {"window_left": window, "q_data_type": BF16, "kv_data_type": self.pages[0].dtype, "o_data_type": BF16}
        if batch.num_decodes:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(starts, indices, last_lens.cuda(), *heads, sm_scale=spec.scale, **options)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
            tables = (batch.cu_query_lens, starts, indices, last_lens.cuda())
            wrapper.plan(*tables, *heads, causal=True, sm_scale=spec.scale, **options)
        output: Tensor = wrapper.run(self.case.q, self.pages, **self.scales)
        return output


def check(row: str, case: PagedCase, spec: AttentionSpec, **problem_options: Any) -> None:
    """Assert that ``row`` serves the case and that its output is FlashInfer's."""
    kv_dtype = torch.float4_e2m1fn_x2 if case.layer_kv.block_scales is not None else case.layer_kv.key.dtype
    capability = torch.cuda.get_device_capability()
    sizes: dict[str, Any] = {"max_num_seqs": len(case.batch.key_lens), "max_num_tokens": len(case.q)}
    problem = AttentionProblem("cuda", BF16, kv_dtype, PAGE_SIZE, (spec.kind,), capability, **sizes, **problem_options)
    backend = CakeBackend(problem, torch.device("cuda"))
    plan = backend.plan(case.batch)
    assert backend.kernel_name(plan, spec).split(", ")[0] == row
    output, _ = backend.forward(case.q, case.layer_kv, plan, spec)
    expected = FlashInferCase.of(case, spec).attend()
    first = 0
    for query_len in case.batch.query_lens:
        ours, theirs = (part[first : first + query_len].float() for part in (output, expected))
        assert ((ours - theirs).norm() / theirs.norm()).item() < MAX_ERROR
        first += query_len


def scales_of(kv_dtype: torch.dtype) -> tuple[float, float]:
    return (1.0, 1.0) if kv_dtype == BF16 else (0.25, 0.5)


@pytest.mark.parametrize("lens", DECODE_LENS)
@pytest.mark.parametrize(
    "row", [row for row in DECODE_VARIANTS[:-1] if row.head_dims[-1] in (64, 128, 256)], ids=lambda row: row.name
)
def test_decodes(row: DecodeVariant, lens: str) -> None:
    spec = make_spec(GROUP * NUM_KV_HEADS, NUM_KV_HEADS, row.head_dims[-1], sliding_window=row.max_keys)
    key_lens = DECODE_LENS[lens][-(row.max_seqs or 100) :]
    kv_dtype = row.dtypes[-1][1]
    case = make_case(
        spec, [1] * len(key_lens), key_lens, len(key_lens), dtype=BF16, kv_dtype=kv_dtype,
        scales=scales_of(kv_dtype), device="cuda",
    )  # fmt: skip
    check(row.name, case, spec)


@pytest.mark.parametrize("row", PREFILL_VARIANTS[:-1], ids=lambda row: row.name)
def test_chunks(row: PrefillVariant) -> None:
    spec = make_spec(GROUP * NUM_KV_HEADS, NUM_KV_HEADS, max(row.head_dims))
    kv_dtype = row.dtypes[-1][1]
    case = make_case(spec, *CHUNKS, 0, dtype=BF16, kv_dtype=kv_dtype, scales=scales_of(kv_dtype), device="cuda")
    check(row.name, case, spec)


@pytest.mark.parametrize("row", SEVERAL_VARIANTS, ids=lambda row: row.name)
def test_drafts(row: DecodeVariant) -> None:
    spec = make_spec(GROUP * NUM_KV_HEADS, NUM_KV_HEADS, row.head_dims[-1])
    kv_dtype = row.dtypes[-1][1]
    case = make_case(spec, *DRAFTS, 0, dtype=BF16, kv_dtype=kv_dtype, scales=scales_of(kv_dtype), device="cuda")
    check(row.name, case, spec, max_drafts=5)
