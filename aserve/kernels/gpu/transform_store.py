"""The transform of keys and of the queries that meet them, with the write of keys to the KV pages, in one kernel."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aserve.kernels.gpu.launch import launch_options
from aserve.kernels.gpu.page_formats import convert, divide, packing_errors, store_divided
from aserve.kernels.operators import KVTarget

BLOCK_OUT = 32  # channels that a program computes
BLOCK_TOKENS = (16, 64)  # of few tokens, of more


def transform_store(queries: Tensor, keys: Tensor, target: KVTarget, overlap: bool) -> Tensor:
    """Store the transformed ``keys`` [T, K, D] and return the transformed ``queries`` [T, H, D], both contiguous.

    Products are of float32 for activations of that type, else of tf32, which holds 16-bit activations as they are.
    ``target`` has pages of 8 or 4 bits, one scale for all keys, and a transform. Programs that compute channels of
    a second half do so with those of the first, too, whose errors they need.
    """
    transform, blocks = target.key_transform, target.block_scales
    assert transform is not None
    assert not isinstance(target.key_scale, Tensor)  # measured ones are not
    num_tokens, num_kv_heads, head_dim = keys.shape
    few, many = BLOCK_TOKENS
    block_tokens = few if num_tokens <= few else many
    page_stride, slot_stride, head_stride, _ = target.key.stride()
    transformed = torch.empty_like(queries)
    grid = (triton.cdiv(num_tokens, block_tokens), num_kv_heads, triton.cdiv(head_dim, BLOCK_OUT))
    _transform_store[grid](
        queries,
        keys,
        transformed,
        transform.query,
        transform.key,
        transform.offset,
        transform.feedback,
        target.key,
        None if blocks is None else blocks.key,
        target.slot_mapping,
        target.key_scale,
        num_tokens,
        queries.shape[1],
        num_kv_heads,
        head_dim,
        target.key.shape[1],
        page_stride,
        slot_stride,
        head_stride,
        block_tokens,
        triton.next_power_of_2(max(head_dim, 16)),
        BLOCK_OUT,
        math.gcd(head_dim // 2, BLOCK_OUT),
        "ieee" if keys.dtype == torch.float32 else "tf32",
        overlap,
        num_warps=4,
        num_stages=1,  # tiles of wide heads fill the shared memory
        **launch_options(overlap),
    )
    return transformed


@triton.jit(do_not_specialize=["slot_mapping", "num_tokens"])
def _transform_store(
    queries,
    keys,
    transformed,
    query_matrices,
    key_matrices,
    offsets,
    feedbacks,
    key_pages,
    key_blocks,
    slot_mapping,
    key_scale: float,
    num_tokens: int,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program computes some channels of a KV head and of its queries, for some tokens."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    kv_head = tl.program_id(1)
    first_out = tl.program_id(2) * BLOCK_OUT
    channel, out = tl.arange(0, BLOCK_DIM), first_out + tl.arange(0, BLOCK_OUT)
    is_token, is_out = token < num_tokens, out < HEAD_DIM
    is_read = is_token[:, None] & (channel < HEAD_DIM)[None, :]
    is_written = is_token[:, None] & is_out[None, :]
    in_matrix = (kv_head * HEAD_DIM + channel)[:, None] * HEAD_DIM + out[None, :]
    is_entry = (channel < HEAD_DIM)[:, None] & is_out[None, :]
    key_matrix = tl.load(key_matrices + in_matrix, mask=is_entry, other=0.0)
    offset = tl.load(offsets + kv_head * HEAD_DIM + out, mask=is_out, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()

    key_rows = (token * NUM_KV_HEADS + kv_head) * HEAD_DIM
    key = tl.load(keys + key_rows[:, None] + channel[None, :], mask=is_read, other=0.0)
    stored = tl.dot(key.to(tl.float32), key_matrix, input_precision=PRECISION) - offset[None, :]
    stored = stored.to(keys.dtype.element_ty)
    slot = tl.load(slot_mapping + token, mask=is_token, other=0)
    place = (slot // PAGE_SIZE) * PAGE_STRIDE + (slot % PAGE_SIZE) * SLOT_STRIDE + kv_head * HEAD_STRIDE
    if key_blocks is not None:  # channels are multiples of BLOCK_OUT then
        to_blocks = key_blocks + first_out // 16
        divided = divide(stored, key_scale)
        if feedbacks is not None:
            divided += _feed_back(
                key, key_matrices, offsets, feedbacks, kv_head, first_out, key_scale,
                HEAD_DIM, BLOCK_OUT, BLOCK_FIRST, PRECISION,
            )  # fmt: skip
        store_divided(divided, key_pages + first_out // 2, to_blocks, place, is_token, BLOCK_OUT)
    else:
        converted = convert(stored, key_scale, key_pages.dtype.element_ty, True)
        tl.store(key_pages + place[:, None] + out[None, :], converted, mask=is_written)

    query_matrix = tl.load(query_matrices + in_matrix, mask=is_entry, other=0.0)
    for i in range(GROUP):
        rows = (token * NUM_HEADS + kv_head * GROUP + i) * HEAD_DIM
        query = tl.load(queries + rows[:, None] + channel[None, :], mask=is_read, other=0.0)
        product = tl.dot(query.to(tl.float32), query_matrix, input_precision=PRECISION)
        tl.store(transformed + rows[:, None] + out[None, :], product.to(queries.dtype.element_ty), mask=is_written)


@triton.jit
def _feed_back(
    keys,
    key_matrices,
    offsets,
    feedbacks,
    kv_head,
    first_out,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return what rounding of the first halves of ``keys`` adds to channels from ``first_out`` on, over ``scale``."""
    HALF: tl.constexpr = HEAD_DIM // 2
    channel, out = tl.arange(0, keys.shape[1]), first_out + tl.arange(0, BLOCK_OUT)
    is_channel, is_fed = (channel < HEAD_DIM)[:, None], ((out >= HALF) & (out < HEAD_DIM))[None, :]
    added = tl.zeros([keys.shape[0], BLOCK_OUT], tl.float32)
    for start in range(0, HALF if first_out + BLOCK_OUT > HALF else 0, BLOCK_FIRST):
        first = start + tl.arange(0, BLOCK_FIRST)
        in_matrix = (kv_head * HEAD_DIM + channel)[:, None] * HEAD_DIM + first[None, :]
        matrix = tl.load(key_matrices + in_matrix, mask=is_channel, other=0.0)
        offset = tl.load(offsets + kv_head * HEAD_DIM + first)
        stored = tl.dot(keys.to(tl.float32), matrix, input_precision=PRECISION) - offset[None, :]
        in_feedback = (kv_head * HALF + first)[:, None] * HALF + (out - HALF)[None, :]
        feedback = tl.load(feedbacks + in_feedback, mask=is_fed, other=0.0)
        added += tl.dot(packing_errors(divide(stored.to(keys.dtype), scale)), feedback, input_precision=PRECISION)
    return added
