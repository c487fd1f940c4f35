"""Query-key norm, rotary embedding and the write to the KV pages in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aserve.kernels.gpu.launch import FLOATS, launch_options
from aserve.kernels.gpu.page_formats import convert, store_packed
from aserve.kernels.gpu.transform_store import transform_store
from aserve.kernels.nvfp4 import HEAD_GRAIN, NVFP4
from aserve.kernels.operators import HeadLayout, HeadNorms, KVTarget

BLOCK_HEADS = 8
FLOAT8_CAPABILITY = (8, 9)  # from which on Triton converts to e4m3, in which nvfp4 has its scales


def can_store(
    qkv: Tensor,
    heads: HeadLayout,
    norms: HeadNorms | None,
    cos_sin: Tensor,
    positions: Tensor,
    target: KVTarget,
) -> bool:
    """Whether ``rope_store`` serves these, given that kernels serve ``qkv``."""
    key, value = target.key, target.value
    return (
        heads.head_dim % 2 == 0
        and key.dtype == value.dtype
        and can_convert_to(key.dtype if target.block_scales is None else NVFP4, qkv.device)
        and key.shape == value.shape
        and key.stride() == value.stride()
        and key.stride(3) == 1
        and cos_sin.dtype == torch.float32
        and all(tensor.is_contiguous() for tensor in (cos_sin, positions, target.slot_mapping))
        and _can_pack(heads, target)
        and (norms is None or norms.query.dtype == norms.key.dtype in (qkv.dtype, torch.float32))
    )


def _can_pack(heads: HeadLayout, target: KVTarget) -> bool:
    """Whether pages are not of nvfp4, or such that halves of heads have whole blocks whose scales lie as pages do."""
    blocks = target.block_scales
    if blocks is None:
        return True
    strides = tuple(stride // 8 for stride in target.key.stride()[:3])
    return heads.head_dim % HEAD_GRAIN == 0 and blocks.key.stride() == blocks.value.stride() == (*strides, 1)


def can_convert_to(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel on ``device`` can write pages of ``dtype``."""
    if dtype in (torch.float8_e4m3fn, NVFP4):
        return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY
    return dtype in FLOATS


def rope_store(
    qkv: Tensor,
    heads: HeadLayout,
    norms: HeadNorms | None,
    cos_sin: Tensor,
    positions: Tensor,
    target: KVTarget,
    overlap: bool,
) -> Tensor:
    """Return the rotated queries [T, H, D], in memory of their own; see ``Operators.rope_store``.

    Where keys are transformed, another kernel does that and stores them.
    """
    num_tokens, head_dim = len(qkv), heads.head_dim
    queries = torch.empty(num_tokens, heads.num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return queries
    keys = None if target.key_transform is None else queries.new_empty(num_tokens, heads.num_kv_heads, head_dim)
    half_block = triton.next_power_of_2(head_dim // 2)
    num_blocks = triton.cdiv(heads.num_heads + 2 * heads.num_kv_heads, BLOCK_HEADS)
    page_stride, slot_stride, head_stride, _ = target.key.stride()
    blocks = target.block_scales
    _rope_store[(num_tokens, num_blocks)](
        qkv,
        queries,
        keys,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        cos_sin,
        positions,
        target.key,
        target.value,
        None if blocks is None else blocks.key,
        None if blocks is None else blocks.value,
        target.slot_mapping,
        0.0 if norms is None else norms.eps,
        target.key_scale,
        target.value_scale,
        heads.num_heads,
        heads.num_kv_heads,
        head_dim,
        target.key.shape[1],
        page_stride,
        slot_stride,
        head_stride,
        target.key.dtype.itemsize == 1,
        isinstance(target.key_scale, Tensor),
        BLOCK_HEADS,
        half_block,
        overlap,
        num_warps=max(BLOCK_HEADS * half_block // 256, 1),
        **launch_options(overlap),
    )
    return queries if keys is None else transform_store(queries, keys, target, overlap)


@triton.jit(do_not_specialize=["positions", "slot_mapping"])
def _rope_store(
    qkv,
    queries,
    keys,
    query_gain,
    key_gain,
    cos_sin,
    positions,
    key_pages,
    value_pages,
    key_blocks,
    value_blocks,
    slot_mapping,
    eps: float,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    IS_SCALED: tl.constexpr,
    HAS_HEAD_SCALES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program takes some heads of a token, whatever their kinds; each head is held as its two halves.

    Rounds to the activations' dtype where the reference does: after the norm, its gain and the rotation.
    With wider gains the norm itself is not rounded. Keys go to ``keys`` [T, K, D], if that is given, else to the pages.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    ROW: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    channel = tl.arange(0, HALF_BLOCK)
    in_half = channel < HALF
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    source = qkv + token * ROW + head[:, None] * HEAD_DIM + channel[None, :]
    first_raw = tl.load(source, mask=inside, other=0.0)
    second_raw = tl.load(source + HALF, mask=inside, other=0.0)
    dtype = first_raw.dtype
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)

    if query_gain is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        gain_first = _pick_gain(query_gain, key_gain, is_query, channel, in_half)
        gain_second = _pick_gain(query_gain, key_gain, is_query, channel + HALF, in_half)
        first, second = first * scale, second * scale
        if query_gain.dtype.element_ty == qkv.dtype.element_ty:
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        first = (gain_first * first).to(dtype).to(tl.float32)
        second = (gain_second * second).to(dtype).to(tl.float32)

    angles = cos_sin + tl.load(positions + token) * HEAD_DIM + channel
    cos = tl.load(angles, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=in_half, other=0.0)[None, :]
    first_rotated = (first * cos - second * sin).to(dtype)
    second_rotated = (second * cos + first * sin).to(dtype)

    to_query = queries + token * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + channel[None, :]
    tl.store(to_query, first_rotated, mask=inside & is_query[:, None])
    tl.store(to_query + HALF, second_rotated, mask=inside & is_query[:, None])

    slot = tl.load(slot_mapping + token)
    place = (slot // PAGE_SIZE) * PAGE_STRIDE + (slot % PAGE_SIZE) * SLOT_STRIDE  # 64 bits: pools exceed 2^31 values
    stored: tl.constexpr = key_pages.dtype.element_ty
    is_key_head = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    if HAS_HEAD_SCALES:
        key_scale = tl.load(key_scale + head - NUM_HEADS, mask=is_key_head, other=1.0)[:, None]
        value_head = head - NUM_HEADS - NUM_KV_HEADS
        is_value_head = is_value & (value_head < NUM_KV_HEADS)
        value_scale = tl.load(value_scale + value_head, mask=is_value_head, other=1.0)[:, None]
    key_place = place + (head - NUM_HEADS) * HEAD_STRIDE
    value_place = place + (head - NUM_HEADS - NUM_KV_HEADS) * HEAD_STRIDE
    is_key = inside & is_key_head[:, None]
    if keys is not None:
        to_key = keys + (token * NUM_KV_HEADS + head - NUM_HEADS)[:, None] * HEAD_DIM + channel[None, :]
        tl.store(to_key, first_rotated, mask=is_key)
        tl.store(to_key + HALF, second_rotated, mask=is_key)
    if key_blocks is not None:
        is_value_head = is_value & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
        if keys is None:
            _store_packed_halves(
                first_rotated, second_rotated, key_scale, key_pages, key_blocks, key_place, is_key_head, HALF
            )
        _store_packed_halves(
            first_raw, second_raw, value_scale, value_pages, value_blocks, value_place, is_value_head, HALF
        )
    else:
        if keys is None:
            to_key = key_pages + key_place[:, None] + channel[None, :]
            tl.store(to_key, convert(first_rotated, key_scale, stored, IS_SCALED), mask=is_key)
            tl.store(to_key + HALF, convert(second_rotated, key_scale, stored, IS_SCALED), mask=is_key)
        to_value = value_pages + value_place[:, None] + channel[None, :]
        is_value_inside = inside & is_value[:, None]
        tl.store(to_value, convert(first_raw, value_scale, stored, IS_SCALED), mask=is_value_inside)
        tl.store(to_value + HALF, convert(second_raw, value_scale, stored, IS_SCALED), mask=is_value_inside)


@triton.jit
def _store_packed_halves(first, second, scale, pages, block_scales, places, is_kept, HALF: tl.constexpr):
    """Write the halves [heads, HALF or more] of heads as nvfp4; heads begin at ``places``, in bytes."""
    store_packed(first, scale, pages, block_scales, places, is_kept, HALF)
    store_packed(second, scale, pages + HALF // 2, block_scales + HALF // 16, places, is_kept, HALF)


@triton.jit
def _pick_gain(query_gain, key_gain, is_query, channel, inside):
    """Return the gains [heads, channels] in float32, of the query norm or of the key norm."""
    query = tl.load(query_gain + channel, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(key_gain + channel, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], query[None, :], key[None, :])
