"""Packed keys and values as factors of matrix products that each warp computes alone, without a trip through memory.

A thread gets its part of a factor from words that it read itself: channels and keys are put in an order in which the
parts are whole words. Pairs of float16 stay in one register throughout; of keys, the channels of a pair lie in one
word; of values, a pair is one channel of two keys, since products are summed over channels there and over keys here.
"""

import triton
import triton.language as tl

from aserve.kernels.cake.kv_blocks import load_rows


@triton.jit
def load_keys(
    words,
    block_scales,
    pages,
    places,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PER_WORD: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):
    """Return keys [L, WIDTH], zeros past HEAD_DIM, as float16 in the order of ``arrange_channels``.

    ``words`` have PER_WORD elements: 4 of e4m3, or 8 of nvfp4, which are multiplied with the scales of their blocks.
    IS_COMPILED is whether instructions of the GPU can be named.
    """
    LEN: tl.constexpr = places.shape[0]
    WORDS: tl.constexpr = WIDTH // PER_WORD
    rows = load_rows(words, pages, places, None, HEAD_DIM // PER_WORD, WORDS, PAGE_STRIDE).to(tl.uint32, bitcast=True)
    if PER_WORD == 4:
        pairs = _unpack(rows, None, PER_WORD, IS_COMPILED)
    else:
        scales = _load_scales(block_scales, pages, places, HEAD_DIM, WIDTH, PAGE_STRIDE)
        scales = tl.broadcast_to((scales | scales << 16)[:, :, None], [LEN, WORDS // 2, 2])
        pairs = _unpack(rows, tl.reshape(scales, [LEN, WORDS]), PER_WORD, IS_COMPILED)
    low, high = _halves(pairs)
    keys = tl.join(low, high)
    if PER_WORD == 8:
        keys = tl.permute(tl.reshape(keys, [LEN, WORDS, 2, 2, 2]), (0, 1, 2, 4, 3))
    return arrange_channels(tl.reshape(keys, [LEN, WIDTH]), PER_WORD)


@triton.jit
def load_values(
    words,
    block_scales,
    pages,
    places,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PER_WORD: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):
    """Return values [L, WIDTH] so, in the order of keys of ``arrange_weights``; see ``restore_channels``."""
    LEN: tl.constexpr = places.shape[0]
    WORDS: tl.constexpr = WIDTH // PER_WORD
    rows = load_rows(words, pages, places, None, HEAD_DIM // PER_WORD, WORDS, PAGE_STRIDE)
    even, odd = _split_keys(rows.to(tl.uint32, bitcast=True))
    first, last = _interleave(even, odd, IS_COMPILED)
    if PER_WORD == 4:
        first, last = _unpack(first, None, PER_WORD, IS_COMPILED), _unpack(last, None, PER_WORD, IS_COMPILED)
    else:
        even, odd = _split_keys(_load_scales(block_scales, pages, places, HEAD_DIM, WIDTH, PAGE_STRIDE))
        scales = tl.broadcast_to((even | odd << 16)[:, :, None], [LEN // 2, WORDS // 2, 2])
        scales = tl.reshape(scales, [LEN // 2, WORDS])
        first, last = _unpack(first, scales, PER_WORD, IS_COMPILED), _unpack(last, scales, PER_WORD, IS_COMPILED)
    low, high = _halves(tl.permute(tl.join(first, last), (0, 1, 3, 2)))
    values = tl.reshape(tl.join(low, high), [LEN // (4 * PER_WORD), PER_WORD // 2, 4, 8, WIDTH // 8, 2])
    return tl.reshape(tl.permute(values, (0, 2, 1, 5, 4, 3)), [LEN, WIDTH])


@triton.jit
def arrange_channels(rows, PER_WORD: tl.constexpr):
    """Return queries [R, D] in the order that keys have: a quarter of a warp's lanes has whole words of a key."""
    LEN: tl.constexpr = rows.shape[0]
    DIM: tl.constexpr = rows.shape[1]
    if PER_WORD == 4:
        places = tl.permute(tl.reshape(rows, [LEN, DIM // 64, 4, 4, 4]), (0, 1, 3, 2, 4))
    else:
        places = tl.permute(tl.reshape(rows, [LEN, 4, DIM // 32, 2, 2, 2]), (0, 2, 1, 3, 5, 4))
    return tl.reshape(places, [LEN, DIM])


@triton.jit
def arrange_weights(weights, PER_WORD: tl.constexpr):
    """Return the weights [W, R, L] of keys in the order in which a thread has as factors what it has as sums."""
    WARPS: tl.constexpr = weights.shape[0]
    ROWS: tl.constexpr = weights.shape[1]
    LEN: tl.constexpr = weights.shape[2]
    places = tl.reshape(weights, [WARPS, ROWS, LEN // (4 * PER_WORD), PER_WORD // 2, 4, 2])
    return tl.reshape(tl.permute(places, (0, 1, 2, 4, 3, 5)), [WARPS, ROWS, LEN])


@triton.jit
def restore_channels(output):
    """Return sums [R, D] of values in the order of a head's channels."""
    ROWS: tl.constexpr = output.shape[0]
    DIM: tl.constexpr = output.shape[1]
    return tl.reshape(tl.permute(tl.reshape(output, [ROWS, DIM // 8, 8]), (0, 2, 1)), [ROWS, DIM])


@triton.jit
def _unpack(words, scales, PER_WORD: tl.constexpr, IS_COMPILED: tl.constexpr):
    """Return the elements of words [L, W] as pairs of float16 [L, W, PER_WORD / 2], times pairs of scales [L, W].

    Those of e4m3 follow each other; those of nvfp4 are two apart.
    """
    if PER_WORD == 4:
        first, second = _convert(words, IS_COMPILED)
        return tl.join(first, second)
    else:
        evens = (words << 4) & 0x80808080 | (words << 2) & 0x1C1C1C1C
        odds = words & 0x80808080 | (words >> 2) & 0x1C1C1C1C
        first, third = _convert(evens, IS_COMPILED)
        second, fourth = _convert(odds, IS_COMPILED)
        first, second = _multiply(first, scales, IS_COMPILED), _multiply(second, scales, IS_COMPILED)
        third, fourth = _multiply(third, scales, IS_COMPILED), _multiply(fourth, scales, IS_COMPILED)
        pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
        return tl.reshape(pairs, [words.shape[0], words.shape[1], 4])


@triton.jit
def _load_scales(block_scales, pages, places, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE_STRIDE: tl.constexpr):
    """Return the bits of the scales [L, WIDTH / 16] as float16; a head has half as many as words."""
    scales = load_rows(block_scales, pages, places // 2, None, HEAD_DIM // 16, WIDTH // 16, PAGE_STRIDE // 2)
    return scales.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _split_keys(rows):
    """Return every other of rows [L, W], and the rest."""
    return tl.split(tl.permute(tl.reshape(rows, [rows.shape[0] // 2, 2, rows.shape[1]]), (0, 2, 1)))


@triton.jit
def _halves(pairs):
    """Return the float16 in both halves of words."""
    low = (pairs & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


# Triton's interpreter knows no instructions, so what they do is written out for it.


@triton.jit
def _convert(words, IS_COMPILED: tl.constexpr):
    """Return the first and the last two e4m3 of words as pairs of float16."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        return _widen(words) | _widen(words >> 8) << 16, _widen(words >> 16) | _widen(words >> 24) << 16


@triton.jit
def _widen(words):
    """Return the e4m3 in the last byte of words as the bits of a float16."""
    wide = words.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return wide.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _interleave(even, odd, IS_COMPILED: tl.constexpr):
    """Return the first two bytes of each of two words in turn, and the last two."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;",
            "=&r,=&r,r,r",
            [even, odd],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        first = even & 0xFF | (odd & 0xFF) << 8 | (even & 0xFF00) << 8 | (odd & 0xFF00) << 16
        last = (even >> 16) & 0xFF | (odd >> 8) & 0xFF00 | (even >> 8) & 0xFF0000 | odd & 0xFF000000
        return first, last


@triton.jit
def _multiply(pairs, factors, IS_COMPILED: tl.constexpr):
    """Return the products of pairs of float16, which are exact."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise(
            "mul.f16x2 $0, $1, $2;", "=r,r,r", [pairs, factors], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        low, high = _halves(pairs)
        low_factor, high_factor = _halves(factors)
        low, high = (low * low_factor).to(tl.uint16, bitcast=True), (high * high_factor).to(tl.uint16, bitcast=True)
        return low.to(tl.uint32) | high.to(tl.uint32) << 16
