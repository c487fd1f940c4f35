"""Which decode variant serves what, and why others do not."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, SEVERAL_VARIANTS, DecodeVariant
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS
from aserve.kernels.cake.select_variant import VariantProblem, refuse_variant, select_variant
from aserve.kernels.cake.tables import variant_names
from aserve.kernels.cake.variant import UNBOUNDED
from aserve.kernels.nvfp4 import NVFP4

HALF, BF16, FP32, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
USUAL = VariantProblem(BF16, BF16, 128, 4, (9, 0))

CHOICES: list[tuple[dict[str, Any], str | None]] = [
    ({}, "decode-16-d128"),
    ({"return_lse": True}, "decode-16-d128"),
    ({"dtype": HALF, "kv_dtype": HALF, "head_dim": 64}, "decode-16-d64"),
    ({"head_dim": 256, "group": 32}, "decode-16-d256"),
    ({"head_dim": 256, "group": 33}, "decode-plain"),
    ({"head_dim": 256, "group": 33, "max_seqs": 1}, "decode-plain"),
    ({"head_dim": 256, "max_seqs": 4}, "decode-16-d256-few"),
    ({"head_dim": 256, "max_seqs": 5}, "decode-16-d256"),
    ({"max_keys": 128}, "decode-16-d128-short"),
    ({"max_keys": 129}, "decode-16-d128"),
    ({"max_keys": 128, "group": 17}, "decode-16-d128"),
    ({"head_dim": 64, "max_keys": 128}, "decode-16-d64-short"),
    ({"head_dim": 64, "max_keys": 129}, "decode-16-d64"),
    ({"head_dim": 64, "max_keys": 128, "kv_dtype": FP8}, "decode-8-d64"),
    ({"group": 64}, "decode-16-d128"),
    ({"group": 65}, "decode-plain"),
    ({"head_dim": 80}, "decode-16-d128"),
    ({"head_dim": 96}, "decode-16-d128"),
    ({"head_dim": 112, "kv_dtype": FP8}, "decode-8-d128"),
    ({"head_dim": 96, "max_keys": 128, "group": 1}, "decode-16-d128-short"),
    ({"head_dim": 72}, "decode-plain"),
    ({"head_dim": 88}, "decode-plain"),
    ({"head_dim": 120}, "decode-plain"),
    ({"head_dim": 144}, "decode-plain"),
    ({"head_dim": 512}, "decode-16-d512"),
    ({"head_dim": 512, "group": 16}, "decode-16-d512"),
    ({"head_dim": 512, "group": 17}, "decode-plain"),
    ({"head_dim": 512, "kv_dtype": FP8}, "decode-plain"),
    ({"head_dim": 511}, "decode-plain"),
    ({"head_dim": 512, "capability": (8, 6)}, "decode-16-d512"),
    ({"head_dim": 256, "group": 32, "capability": (8, 6)}, "decode-16-d256"),
    ({"group": 64, "capability": (12, 0)}, "decode-plain"),
    ({"capability": (7, 0)}, "decode-plain"),
    ({"head_dim": 513}, None),
    ({"dtype": FP32, "kv_dtype": FP32}, "decode-plain"),
    ({"kv_dtype": HALF}, None),
    ({"kv_dtype": FP8}, "decode-8-d128"),
    ({"kv_dtype": FP8, "head_dim": 64}, "decode-8-d64"),
    ({"kv_dtype": FP8, "head_dim": 256}, "decode-8-d256"),
    ({"kv_dtype": FP8, "head_dim": 64, "capability": (8, 9)}, "decode-8-d64"),
    ({"kv_dtype": FP8, "capability": (8, 9)}, "decode-8-d128"),
    ({"kv_dtype": FP8, "head_dim": 256, "capability": (8, 9)}, "decode-plain"),
    ({"kv_dtype": FP8, "capability": (8, 0)}, None),
    ({"kv_dtype": NVFP4}, "decode-4-d128"),
    ({"dtype": HALF, "kv_dtype": NVFP4, "head_dim": 64}, "decode-4-d64"),
    ({"kv_dtype": NVFP4, "head_dim": 96}, "decode-4-d128"),
    ({"kv_dtype": NVFP4, "head_dim": 80}, None),
    ({"kv_dtype": NVFP4, "capability": (8, 0)}, None),
]


@pytest.mark.parametrize(("change", "expected"), CHOICES)
def test_choices(change: dict[str, Any], expected: str | None) -> None:
    choice = select_variant(dataclasses.replace(USUAL, **change), DECODE_VARIANTS)
    assert (choice.variant and choice.variant.name) == expected
    names = [variant.name for variant in DECODE_VARIANTS]
    skipped = names if expected is None else names[: names.index(expected)]
    assert list(choice.refusals) == skipped, "a reason for each row that was passed over"


REASONS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": FP32, "kv_dtype": FP32}, "it does not read float32 with queries in float32"),
    ({"head_dim": 72}, "it knows head_dim 80, 96, 112, 128, not 72"),
    ({"group": 65}, "it serves up to 64 heads per KV head, not 65"),
    (
        {"group": 64, "capability": (12, 0)},
        "its launch takes 113 KiB of shared memory; compute capability 12.0 has 99",
    ),
    (
        {"capability": (7, 0)},
        "it has no launches for compute capability 7.0, only for 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, 12.1",
    ),
]


@pytest.mark.parametrize(("change", "reason"), REASONS)
def test_reasons(change: dict[str, Any], reason: str) -> None:
    assert select_variant(dataclasses.replace(USUAL, **change), DECODE_VARIANTS).refusals["decode-16-d128"] == reason


def test_reasons_of_exact_rows() -> None:
    refusals = select_variant(USUAL, DECODE_VARIANTS).refusals
    assert refusals["decode-16-d128-short"] == "it serves queries that see 128 keys at most, not any number"
    few = dataclasses.replace(USUAL, head_dim=256, max_seqs=5)
    refusals = select_variant(few, DECODE_VARIANTS).refusals
    assert refusals["decode-16-d256-few"] == "it serves steps of 4 sequences at most, not 5"


def test_heads_count_for_each_query_of_a_sequence() -> None:
    drafts = dataclasses.replace(USUAL, group=8, num_queries=8)
    choice = select_variant(drafts, SEVERAL_VARIANTS)
    assert choice.variant is not None
    assert choice.variant.name == "several-16-d128"
    wide = select_variant(dataclasses.replace(drafts, group=16), SEVERAL_VARIANTS)
    assert wide.variant is None
    assert wide.refusals["several-16-d128"] == "it serves up to 64 heads per KV head, not 16 for each of 8 queries"
    assert select_variant(dataclasses.replace(drafts, group=16, num_queries=4), SEVERAL_VARIANTS).variant is not None


PREFILL_CHOICES: list[tuple[dict[str, Any], str | None]] = [
    ({}, "prefill-16-d128"),
    ({"return_lse": True, "group": 65}, "prefill-16-d128"),
    ({"head_dim": 64}, "prefill-16-d64"),
    ({"head_dim": 65}, "prefill-16-d128"),
    ({"head_dim": 129}, "prefill-16-d256"),
    ({"head_dim": 257}, "prefill-plain"),
    ({"head_dim": 513}, None),
    ({"dtype": FP32, "kv_dtype": FP32}, "prefill-plain"),
    ({"kv_dtype": FP8, "head_dim": 256}, "prefill-8-d256"),
    ({"kv_dtype": FP8, "capability": (8, 0)}, None),
]


@pytest.mark.parametrize(("change", "expected"), PREFILL_CHOICES)
def test_choices_for_prompts(change: dict[str, Any], expected: str | None) -> None:
    choice = select_variant(dataclasses.replace(USUAL, **change), PREFILL_VARIANTS)
    assert (choice.variant and choice.variant.name) == expected


def test_the_last_row_for_prompts_serves_whatever_any_row_serves() -> None:
    plain, others = PREFILL_VARIANTS[-1], PREFILL_VARIANTS[:-1]
    assert plain.writes_lse
    for row in others:
        head_dims = (row.head_dims[0], 32, row.head_dims[-1])
        for (dtype, kv_dtype), head_dim, group in itertools.product(row.dtypes, head_dims, (1, row.max_group)):
            problem = VariantProblem(dtype, kv_dtype, head_dim, group, (9, 0), True)
            assert refuse_variant(row, problem) is not None or refuse_variant(plain, problem) is None


def test_reasons_of_the_compatibility_kernel() -> None:
    plain = DECODE_VARIANTS[-1]
    wide = dataclasses.replace(USUAL, head_dim=513)
    assert refuse_variant(plain, wide) == "it knows head_dim 1 to 512, not 513"
    odd = dataclasses.replace(USUAL, kv_dtype=NVFP4, head_dim=80)
    assert refuse_variant(plain, odd) == "nvfp4 needs a head_dim that is a multiple of 32, not 80"
    old = dataclasses.replace(USUAL, kv_dtype=FP8, capability=(8, 0))
    assert refuse_variant(plain, old) == "float8_e4m3fn needs a GPU of compute capability 8.9 or more, not 8.0"


def test_a_row_that_writes_no_lse_is_passed_over_where_one_is_wanted() -> None:
    silent = DecodeVariant("silent", ((BF16, BF16),), (128,), 8, None, writes_lse=False)
    rows = (silent, *DECODE_VARIANTS)
    assert select_variant(USUAL, rows).variant is silent
    choice = select_variant(dataclasses.replace(USUAL, return_lse=True), rows)
    assert choice.variant is not None
    assert choice.variant.name == "decode-16-d128", "the next with the same flags"
    assert choice.refusals["silent"] == "it leaves no log-sum-exp"
    alone = select_variant(dataclasses.replace(USUAL, return_lse=True), (silent, DECODE_VARIANTS[-1]))
    assert alone.variant is DECODE_VARIANTS[-1], "or the compatibility kernel"


def test_the_compatibility_kernel_serves_whatever_any_row_serves() -> None:
    plain, others = DECODE_VARIANTS[-1], DECODE_VARIANTS[:-1]
    assert plain.writes_lse
    for row, return_lse in itertools.product(others, (False, True)):
        for (dtype, kv_dtype), head_dim, group in itertools.product(row.dtypes, row.head_dims, (1, row.max_group)):
            domain = {"max_keys": row.max_keys or UNBOUNDED, "max_seqs": row.max_seqs or UNBOUNDED}
            problem = VariantProblem(dtype, kv_dtype, head_dim, group, (9, 0), return_lse, **domain)
            assert refuse_variant(row, problem) is None
            assert refuse_variant(plain, problem) is None


def test_names_are_unique() -> None:
    """Over all tables, in which a pin is looked up."""
    names = variant_names()
    assert len(names) == len(DECODE_VARIANTS) + len(SEVERAL_VARIANTS) + len(PREFILL_VARIANTS)
    assert len(set(names)) == len(names)
