"""The kernels around FlashInfer's lists of pages, against lists made in Python."""

import itertools
from pathlib import Path

import pytest
import torch
from doubles_attention import CapturedCase, make_case, make_spec
from doubles_hopper import compile_by

from aserve.attention.base import CaptureShape, StepTables
from aserve.attention.page_lists import PageLists, fill_page_lists, scale_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIRT = -77


def dirty_lists(num_seqs: int, num_pages: int) -> PageLists:
    lists = PageLists.allocate(num_seqs, num_pages, torch.device(DEVICE))
    for tensor in (lists.starts, lists.pages, lists.last_page_lens, lists.query_starts):
        tensor.fill_(DIRT)
    return lists


def check_pages(lists: PageLists, tables: StepTables, key_lens: list[int], page_size: int) -> None:
    starts = lists.starts.tolist()
    counts = [-(-key_len // page_size) for key_len in key_lens]
    assert starts[:2] == [0, 0], "the first sequence is empty"
    assert [stop - start for start, stop in itertools.pairwise(starts[1:])] == counts
    pages = lists.pages.tolist()
    for i, (row, count) in enumerate(zip(tables.rows.tolist(), counts, strict=True)):
        assert pages[starts[i + 1] : starts[i + 2]] == tables.page_table[row, :count].tolist()
    assert all(page == DIRT for page in pages[starts[-1] :]), "nothing is written behind the last page"
    lens = lists.last_page_lens.tolist()[1:]
    assert [
        (count - 1) * page_size + last for count, last, key_len in zip(counts, lens, key_lens, strict=True) if key_len
    ] == [key_len for key_len in key_lens if key_len]
    assert all(1 <= last <= page_size for last, key_len in zip(lens, key_lens, strict=True) if key_len)


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_sections_of_a_padded_step(page_size: int) -> None:
    spec = make_spec(1, 1, 64)
    case = make_case(spec, [1, 1, 1, 7, 20], [3100, 16, 17, 7, 33], 3, page_size=page_size)
    captured = CapturedCase.make(CaptureShape(40, 5, 4), 3103, page_size, DEVICE)
    captured.fill(case, dummy_page=0)
    for start, stop, key_lens in ((0, 5, [3100, 16, 17, 1, 1]), (5, 9, [7, 33, 0, 0])):
        tables = captured.tables.section(start, stop)
        lists = dirty_lists(stop - start, (stop - start) * 3103)
        fill_page_lists(tables, lists, are_decodes=start == 0)
        check_pages(lists, tables, key_lens, page_size)
        queries = [0, 0, 1, 2, 3, 3, 3] if start == 0 else [3, 3, 10, 30, 30, 30]
        assert lists.query_starts.tolist() == queries, "padding has no query"


def test_chunks_alone_may_count_their_own_queries() -> None:
    case = make_case(make_spec(1, 1, 64), [1, 7, 20], [9, 7, 33], 1, device=DEVICE)
    batch = case.batch
    tables = StepTables(
        page_table=batch.page_table[1:],
        rows=torch.arange(2, dtype=torch.int32, device=DEVICE),
        key_lens=batch.key_lens_device[1:],
        cu_query_lens=batch.cu_query_lens[1:],
        page_size=16,
    )
    lists = dirty_lists(2, 4)
    fill_page_lists(tables, lists, are_decodes=False, is_relative=True)
    check_pages(lists, tables, [7, 33], 16)
    assert lists.query_starts.tolist() == [0, 0, 7, 27]


def test_more_sequences_than_are_counted_at_once() -> None:
    num_seqs = 300
    key_lens = torch.randint(0, 60, (num_seqs,), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    tables = StepTables(
        page_table=torch.arange((num_seqs + 1) * 4, dtype=torch.int32, device=DEVICE).view(-1, 4),
        rows=torch.randperm(num_seqs, generator=torch.Generator().manual_seed(4)).to(torch.int32).to(DEVICE),
        key_lens=key_lens.to(DEVICE),
        cu_query_lens=torch.tensor([num_seqs], dtype=torch.int32, device=DEVICE),
        page_size=16,
    )
    lists = dirty_lists(num_seqs, num_seqs * 4)
    fill_page_lists(tables, lists, are_decodes=True)
    check_pages(lists, tables, key_lens.tolist(), 16)


def test_smaller_lists_share_the_memory_of_larger_ones() -> None:
    lists = dirty_lists(9, 20)
    first = lists.first(3)
    assert first.starts.data_ptr() == lists.starts.data_ptr()
    assert [len(first.starts), len(first.pages), len(first.last_page_lens), len(first.query_starts)] == [5, 20, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_rows_of_the_section_are_scaled(dtype: torch.dtype) -> None:
    output = torch.randn(9, 24, 64, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    expected = output.clone()
    expected[2:7] = (expected[2:7].float() * 0.3).to(dtype)
    scale_rows(output, torch.tensor([2, 2, 4, 7, 7], dtype=torch.int32, device=DEVICE), 0.3)
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(output, expected, rtol=rounding, atol=0)
    assert torch.equal(output[:2], expected[:2])
    assert torch.equal(output[7:], expected[7:])


def test_no_size_or_place_of_the_tables_compiles_another_kernel(tmp_path: Path) -> None:
    """For a Hopper GPU, for which none is needed: decodes, captured chunks and eager chunks."""
    compiled = compile_by(Path(__file__).with_name("hopper_compile.py"), tmp_path)
    assert sorted(compiled) == ["_fill_page_lists"] * 3 + ["_scale_rows"]
