"""Where the keys of a block lie in their pages, and how keys and values are read from there."""

import triton
import triton.language as tl


@triton.jit
def find_keys(
    table_row,
    positions,
    key_len,
    kv_head,
    PAGE_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
):
    """Return the page of each of ``positions`` [L], and where in it the head begins.

    Positions past the last key get that key's, so that what is read there needs no mask; without keys, page 0's.
    """
    nearest = tl.minimum(positions, key_len - 1)
    unsigned = nearest.to(tl.uint32)
    pages = tl.load(table_row + unsigned // PAGE_SIZE, mask=nearest >= 0, other=0)
    return pages, (unsigned % PAGE_SIZE).to(tl.int32) * TOKEN_STRIDE + kv_head * HEAD_STRIDE


@triton.jit
def load_pages(table_row, first, stop, BLOCK_LEN: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return the pages of BLOCK_LEN positions from ``first`` on, or the one page of all; those from ``stop`` on have 0.

    ``first`` is a multiple of BLOCK_LEN.
    """
    if PAGE_SIZE % BLOCK_LEN == 0:
        return tl.load(table_row + first // PAGE_SIZE, mask=first < stop, other=0)
    else:
        positions = first + tl.arange(0, BLOCK_LEN)
        if BLOCK_LEN % PAGE_SIZE == 0:
            entries = first // PAGE_SIZE + tl.arange(0, BLOCK_LEN) // PAGE_SIZE
        else:
            entries = positions // PAGE_SIZE
        return tl.load(table_row + entries, mask=positions < stop, other=0)


@triton.jit
def find_block_places(
    first,
    kv_head,
    BLOCK_LEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
):
    """Return where in their pages the head of BLOCK_LEN positions from ``first`` on, a multiple of it, begins."""
    places = tl.arange(0, BLOCK_LEN)
    if PAGE_SIZE % BLOCK_LEN == 0:
        places = first % PAGE_SIZE + places
    elif BLOCK_LEN % PAGE_SIZE == 0:  # the same in each block
        places = places % PAGE_SIZE
    else:
        places = (first + places) % PAGE_SIZE
    return places * TOKEN_STRIDE + kv_head * HEAD_STRIDE


@triton.jit
def load_block(
    stored,
    block_scales,
    pages,
    places,
    is_key,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PER_WORD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return keys or values [L, WIDTH] in ``DTYPE``, not yet scaled, with zeros past HEAD_DIM.

    They begin at ``places`` in ``pages``, [L] each, or one page of all. Where PER_WORD is not 1, ``stored`` are words
    of 4 elements of e4m3 or of 8 of nvfp4, as places count; what is returned stands where ``find_channels`` says and
    is to be scaled by ``load_scale``.

    What no key of the sequence fills may be NaN: it may not be read, not even to be given no weight. If not all are
    keys of it, ``is_key`` says which, and there are zeros for the others.
    """
    rows = load_rows(stored, pages, places, is_key, HEAD_DIM // PER_WORD, WIDTH // PER_WORD, PAGE_STRIDE)
    if PER_WORD == 1:
        return rows.to(DTYPE)
    elif PER_WORD == 4:
        return _unpack_bytes(rows).to(DTYPE)
    else:
        # A head has half as many scales as words, and so has all before it.
        scales = load_rows(block_scales, pages, places // 2, is_key, HEAD_DIM // 16, WIDTH // 16, PAGE_STRIDE // 2)
        scales = scales.to(tl.float16)
        blocks = tl.reshape(_unpack_nibbles(rows), [rows.shape[0], WIDTH // 16, 16])
        return tl.reshape(blocks * scales[:, :, None], [rows.shape[0], WIDTH]).to(DTYPE)  # the product is exact


@triton.jit
def find_channels(WIDTH: tl.constexpr, PER_WORD: tl.constexpr):
    """Return the channel of a head that stands at each place of what ``load_block`` returns."""
    places = tl.arange(0, WIDTH)
    if PER_WORD == 1:
        return places
    else:
        HALF: tl.constexpr = PER_WORD // 2
        return places // PER_WORD * PER_WORD + places % 2 * HALF + places // 2 % HALF


@triton.jit
def mask_channels(is_row, channels, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return which channels of rows there are, [L, WIDTH], or [L, 1] for heads that fill their width."""
    if HEAD_DIM == WIDTH:
        return is_row[:, None]
    else:
        return is_row[:, None] & (channels < HEAD_DIM)[None, :]


@triton.jit
def load_scale(scale, kv_head, IS_PER_HEAD: tl.constexpr, PER_WORD: tl.constexpr):
    """Return what keys or values of a KV head, as ``load_block`` returns them, are to be multiplied with.

    ``scale`` is a number for all heads, or where those of each begin.
    """
    if IS_PER_HEAD:
        scale = tl.load(scale + kv_head)
    if PER_WORD == 4:
        scale *= 256.0
    elif PER_WORD == 8:
        scale *= 16384.0
    return scale


@triton.jit
def load_rows(stored, pages, places, is_key, LENGTH: tl.constexpr, WIDTH: tl.constexpr, PAGE_STRIDE: tl.constexpr):
    """Return LENGTH elements from each of ``places`` in their pages on; zeros beside them, and where there is no key.

    Pages, the only part that differs among rows of a thread, are added last.
    """
    elements = tl.arange(0, WIDTH)
    page_starts = pages.to(tl.int64) * PAGE_STRIDE
    if len(pages.shape) == 1:
        page_starts = page_starts[:, None]
    pointers = stored + (places[:, None] + elements[None, :]) + page_starts
    if LENGTH < WIDTH:
        is_inside = (elements < LENGTH)[None, :]
        is_inside = is_inside if is_key is None else is_key[:, None] & is_inside
        return tl.load(pointers, mask=is_inside, other=0.0)
    elif is_key is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=is_key[:, None], other=0.0)


# Elements become float16 by a shift: their exponent becomes the last bits of a wider one, so they are 2^8 (e4m3) or
# 2^14 (e2m1) too small, subnormal ones included. What has the same place in both halves of a word is moved at once.


@triton.jit
def _unpack_bytes(words):
    """Return the e4m3 of words [L, W] as float16 [L, 4 * W] in the order 0, 2, 1, 3."""
    words = words.to(tl.uint32, bitcast=True)
    first = (words << 8) & 0x80008000 | (words << 7) & 0x3F803F80
    second = words & 0x80008000 | (words >> 1) & 0x3F803F80
    return _split_pairs(tl.reshape(tl.join(first, second), [words.shape[0], 2 * words.shape[1]]))


@triton.jit
def _unpack_nibbles(words):
    """Return the e2m1 of words [L, W] as float16 [L, 8 * W] in the order 0, 4, 1, 5, 2, 6, 3, 7."""
    words = words.to(tl.uint32, bitcast=True)
    first = (words << 12) & 0x80008000 | (words << 9) & 0x0E000E00
    second = (words << 8) & 0x80008000 | (words << 5) & 0x0E000E00
    third = (words << 4) & 0x80008000 | (words << 1) & 0x0E000E00
    fourth = words & 0x80008000 | (words >> 3) & 0x0E000E00
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return _split_pairs(tl.reshape(pairs, [words.shape[0], 4 * words.shape[1]]))


@triton.jit
def _split_pairs(pairs):
    """Return the halves of words [L, W] as float16 [L, 2 * W], the lower first."""
    low = (pairs & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), [pairs.shape[0], 2 * pairs.shape[1]])
