"""Where the keys of a block lie in their pages, and how keys and values are read from there."""

import triton
import triton.language as tl


@triton.jit
def find_offsets(
    table_row,
    positions,
    is_key,
    kv_head,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
):
    """Return where the head of each of ``positions`` [L] begins, in elements; ``is_key`` None reads all entries."""
    if is_key is None:
        pages = tl.load(table_row + positions // PAGE_SIZE)
    else:
        pages = tl.load(table_row + positions // PAGE_SIZE, mask=is_key, other=0)
    return pages.to(tl.int64) * PAGE_STRIDE + (positions % PAGE_SIZE) * TOKEN_STRIDE + kv_head * HEAD_STRIDE


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
def find_offsets_in(
    pages,
    first,
    kv_head,
    BLOCK_LEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
):
    """Return the same as ``find_offsets`` for the positions whose ``pages`` have been loaded."""
    places = tl.arange(0, BLOCK_LEN)
    if PAGE_SIZE % BLOCK_LEN == 0:
        places = first % PAGE_SIZE + places
    elif BLOCK_LEN % PAGE_SIZE == 0:  # the same in each block
        places = places % PAGE_SIZE
    else:
        places = (first + places) % PAGE_SIZE
    return pages.to(tl.int64) * PAGE_STRIDE + (places * TOKEN_STRIDE + kv_head * HEAD_STRIDE)


@triton.jit
def load_block(stored, offsets, is_key, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """Return keys or values [L, WIDTH] in ``DTYPE``, not yet scaled, with zeros past HEAD_DIM.

    What no key of the sequence fills may be NaN: it is not read, not even to be given no weight.
    """
    elements = tl.arange(0, WIDTH)
    pointers = stored + (offsets[:, None] + elements[None, :])
    if HEAD_DIM < WIDTH:
        is_inside = (elements < HEAD_DIM)[None, :]
        is_inside = is_inside if is_key is None else is_key[:, None] & is_inside
        block = tl.load(pointers, mask=is_inside, other=0.0)
    elif is_key is None:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=is_key[:, None], other=0.0)
    return block.to(DTYPE)
