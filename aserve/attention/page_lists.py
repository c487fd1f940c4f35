"""From the page table to lists of pages one after another, as FlashInfer reads them; one kernel on the device."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.attention.base import StepTables

BLOCK = 1024  # pages that one program copies
SEQ_BLOCK = 256  # sequences whose pages are counted at once


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages of N sequences behind an empty sequence that stands first, int32 on the device.

    Thread blocks that a captured grid has too many get the empty sequence, and have nothing to do.
    """

    starts: Tensor  # [N + 2] where each sequence's pages begin in ``pages``
    pages: Tensor
    last_page_lens: Tensor  # [N + 1] tokens on the last page
    query_starts: Tensor  # [N + 2] where each sequence's queries begin

    @classmethod
    def allocate(cls, num_seqs: int, num_pages: int, device: torch.device) -> "PageLists":
        """Return lists with room for ``num_seqs`` sequences that have ``num_pages`` pages together."""

        def empty(length: int) -> Tensor:
            return torch.empty(length, dtype=torch.int32, device=device)

        return cls(empty(num_seqs + 2), empty(num_pages), empty(num_seqs + 1), empty(num_seqs + 2))

    def first(self, num_seqs: int) -> "PageLists":
        """Return the lists of the first ``num_seqs`` sequences, in the same memory."""
        return PageLists(
            self.starts[: num_seqs + 2],
            self.pages,
            self.last_page_lens[: num_seqs + 1],
            self.query_starts[: num_seqs + 2],
        )


def fill_page_lists(tables: StepTables, lists: PageLists, *, are_decodes: bool, is_relative: bool = False) -> None:
    """Fill ``lists`` for the sequences of ``tables``, which are decodes only or chunks only.

    Decodes have one query each, but only as many of them as ``tables.cu_query_lens`` begins with; the others none.
    ``is_relative`` counts the queries of chunks from the first chunk's.
    """
    width = tables.page_table.shape[1]
    _fill_page_lists[(len(tables.rows), triton.cdiv(width, BLOCK))](
        tables.page_table,
        tables.page_table.stride(0),
        tables.rows,
        tables.key_lens,
        tables.cu_query_lens,
        lists.starts,
        lists.pages,
        lists.last_page_lens,
        lists.query_starts,
        PAGE_SIZE=tables.page_size,
        ARE_DECODES=are_decodes,
        IS_RELATIVE=is_relative,
        SEQ_BLOCK=SEQ_BLOCK,
        BLOCK=BLOCK,
    )


# Views and strides of any alignment come in; specialised on it, the kernel would be compiled again while serving.
@triton.jit(do_not_specialize=["page_table", "table_stride", "rows", "key_lens", "cu_query_lens"])
def _fill_page_lists(
    page_table,
    table_stride,
    rows,
    key_lens,
    cu_query_lens,
    starts,
    pages,
    last_page_lens,
    query_starts,
    PAGE_SIZE: tl.constexpr,
    ARE_DECODES: tl.constexpr,
    IS_RELATIVE: tl.constexpr,
    SEQ_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq, block = tl.program_id(0), tl.program_id(1)
    num_pages = (tl.load(key_lens + seq) + PAGE_SIZE - 1) // PAGE_SIZE
    if block * BLOCK < num_pages or block == 0:
        start, base = 0, 0
        while base < seq:
            earlier = base + tl.arange(0, SEQ_BLOCK)
            earlier_lens = tl.load(key_lens + earlier, mask=earlier < seq, other=0)
            start += tl.sum((earlier_lens + PAGE_SIZE - 1) // PAGE_SIZE)
            base += SEQ_BLOCK
        places = block * BLOCK + tl.arange(0, BLOCK)
        is_page = places < num_pages
        row = tl.load(rows + seq).to(tl.int64)
        tl.store(pages + start + places, tl.load(page_table + row * table_stride + places, mask=is_page), mask=is_page)
        if block == 0:
            _write_ends(starts, last_page_lens, seq, start, num_pages, tl.load(key_lens + seq), PAGE_SIZE)
            _write_queries(query_starts, cu_query_lens, seq, ARE_DECODES, IS_RELATIVE)


@triton.jit
def _write_ends(starts, last_page_lens, seq, start, num_pages, key_len, PAGE_SIZE: tl.constexpr):
    tl.store(starts + seq + 2, start + num_pages)
    tl.store(last_page_lens + seq + 1, key_len - (num_pages - 1) * PAGE_SIZE)
    if seq == 0:
        tl.store(starts, 0)
        tl.store(starts + 1, 0)
        tl.store(last_page_lens, 0)


@triton.jit
def _write_queries(query_starts, cu_query_lens, seq, ARE_DECODES: tl.constexpr, IS_RELATIVE: tl.constexpr):
    first = tl.load(cu_query_lens)
    if ARE_DECODES:
        start = 0
        stop = tl.minimum(seq + 1, first)
    else:
        start = 0 if IS_RELATIVE else first
        stop = tl.load(cu_query_lens + seq + 1) - first + start
    tl.store(query_starts + seq + 2, stop)
    if seq == 0:
        tl.store(query_starts, start)
        tl.store(query_starts + 1, start)


def scale_rows(output: Tensor, query_starts: Tensor, scale: float) -> None:
    """Multiply the rows of ``output`` [T, H, D] from the first to the last of ``query_starts`` by ``scale``."""
    row_len = output.shape[1] * output.shape[2]
    _scale_rows[(output.shape[0], triton.cdiv(row_len, BLOCK))](
        output, query_starts, len(query_starts) - 1, scale, row_len, BLOCK=BLOCK
    )


@triton.jit(do_not_specialize=["output", "query_starts", "last", "scale", "row_len"])
def _scale_rows(output, query_starts, last, scale, row_len, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= tl.load(query_starts) and row < tl.load(query_starts + last):
        places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        pointers = output + row.to(tl.int64) * row_len + places
        is_inside = places < row_len
        values = tl.load(pointers, mask=is_inside).to(tl.float32) * scale
        tl.store(pointers, values.to(output.dtype.element_ty), mask=is_inside)
