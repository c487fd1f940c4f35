"""Keys that are transformed on their way into pages of few bits, and the queries that meet them, against float64."""

import dataclasses

import pytest
import torch
from doubles_operators import IS_INTERPRETED, RopeCase, assert_near
from torch import Tensor

from aserve.kernels.gpu.gpu_operators import GpuOperators
from aserve.kernels.key_transform import KeyTransform
from aserve.kernels.nvfp4 import BlockScales, dequantise
from aserve.kernels.operators import HeadLayout, KVTarget, Operators

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
FLOAT8 = torch.float8_e4m3fn
SHAPES = [  # heads, tokens, whether the heads of a page stand before its slots, dtype of activations
    (HeadLayout(6, 2, 64), 5, False, torch.float32),
    (HeadLayout(2, 2, 96), 17, True, torch.bfloat16),
    (HeadLayout(3, 1, 128), 1, False, torch.bfloat16),
]
TOO_FAR = {False: 0.12 if IS_INTERPRETED else 0.05, True: 0.12}  # the interpreter errs in rounding to e4m3


def draw_transform(num_kv_heads: int, head_dim: int, has_feedback: bool) -> KeyTransform:
    """Any matrix will do here, also one that is no inverse of the other; the feedback is too large to be missed."""
    key, query = torch.randn(2, num_kv_heads, head_dim, head_dim, device=DEVICE) / head_dim**0.5
    half = head_dim // 2
    feedback = 4 * torch.randn(num_kv_heads, half, half, device=DEVICE) / half**0.5 if has_feedback else None
    return KeyTransform(key, query, torch.randn(num_kv_heads, head_dim, device=DEVICE), feedback)


def feed_back(stored: Tensor, wanted: Tensor, transform: KeyTransform) -> Tensor:
    """Return what the halves of keys are to be, of which the first are ``stored`` and all were ``wanted`` [T, K, D]."""
    assert transform.feedback is not None
    half = wanted.shape[-1] // 2
    errors = stored[..., :half].double() - wanted[..., :half]
    added = torch.einsum("tkd,kde->tke", errors, transform.feedback.double())
    return torch.cat((wanted[..., :half], wanted[..., half:] + added), -1)


def pack(case: RopeCase, target: KVTarget) -> KVTarget:
    """Return a target in nvfp4 with as many pages."""
    num_pages, page_size, num_kv_heads, head_dim = target.key.shape
    inner = (num_kv_heads, page_size) if case.is_head_major else (page_size, num_kv_heads)

    def zeros(width: int, dtype: torch.dtype) -> Tensor:
        pages = torch.zeros(num_pages, *inner, width, dtype=dtype, device=DEVICE)
        return pages.transpose(1, 2) if case.is_head_major else pages

    key, value = (zeros(head_dim // 2, torch.uint8) for _ in range(2))
    blocks = BlockScales(*(zeros(head_dim // 16, FLOAT8) for _ in range(2)))
    return dataclasses.replace(target, key=key, value=value, block_scales=blocks)


def read(pages: Tensor, block_scales: Tensor | None, slots: Tensor) -> Tensor:
    """Return what is stored at ``slots``, in float32."""
    stored = pages.flatten(0, 1)[slots]
    return stored.float() if block_scales is None else dequantise(stored, block_scales.flatten(0, 1)[slots])


@pytest.mark.parametrize("operators", [GpuOperators(), Operators()], ids=["triton", "torch"])
@pytest.mark.parametrize(("is_packed", "has_feedback"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("heads", "num_tokens", "is_head_major", "dtype"), SHAPES)
def test_transformed_keys_and_queries(
    operators: Operators,
    heads: HeadLayout,
    num_tokens: int,
    is_head_major: bool,
    dtype: torch.dtype,
    is_packed: bool,
    has_feedback: bool,
) -> None:
    torch.manual_seed(0)
    scales = (0.01, 0.02)
    case = RopeCase(heads, 16, is_head_major, True, dtype, FLOAT8, num_tokens, DEVICE, scales=scales)
    qkv, norms, cos_sin, positions, target = case.make()
    if is_packed:
        target = pack(case, target)
    transform = draw_transform(heads.num_kv_heads, heads.head_dim, has_feedback)
    target = dataclasses.replace(target, key_transform=transform)
    found = operators.rope_store(qkv.clone(), heads, norms, cos_sin, positions, target)
    q, k, v = case.expect(qkv, norms, cos_sin, positions)
    grouped = q.view(num_tokens, heads.num_kv_heads, -1, heads.head_dim)
    assert_near(found, torch.einsum("tkgd,kde->tkge", grouped, transform.query.double()).flatten(1, 2), dtype)
    expected = torch.einsum("tkd,kde->tke", k, transform.key.double()) - transform.offset.double()
    blocks = target.block_scales
    for pages, block_scales, scale, wanted in (
        (target.key, None if blocks is None else blocks.key, scales[0], expected),
        (target.value, None if blocks is None else blocks.value, scales[1], v),
    ):
        if not is_packed:
            wanted = wanted.clamp(-448 * scale, 448 * scale)
        stored = read(pages, block_scales, target.slot_mapping) * scale
        if has_feedback and pages is target.key:
            wanted = feed_back(stored, wanted, transform)
        num_parts = 2 if has_feedback else 1
        for found_part, part in zip(stored.double().chunk(num_parts, -1), wanted.chunk(num_parts, -1), strict=True):
            error = (found_part - part).norm() / part.norm()
            assert error < TOO_FAR[is_packed], f"relative error {error:.2e}"
