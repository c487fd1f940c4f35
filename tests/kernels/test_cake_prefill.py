"""The cake family's paged prefill against dense attention in float64: on a GPU, or on the CPU under the interpreter."""

import dataclasses
from typing import Any

import pytest
import torch
from doubles_attention import MAX_ERRORS, make_spec
from doubles_cake import CHUNK_LAUNCH, DEVICE, FORMATS, RULES, check, chunks, make_call, run_chunks
from triton.runtime.interpreter import interpreter_builder

from aserve.kernels.cake.attention_call import KVPages, PagedBatch, ScoreRules
from aserve.kernels.cake.paged_prefill import run_prefill
from aserve.kernels.cake.prefill_launch import plain_launch
from aserve.kernels.cake.prefill_tiles import PrefillTiles, fill_tiles

HEAD_SCALES = (torch.tensor([0.25, 2.0], device=DEVICE), torch.tensor([0.5, 1.5], device=DEVICE))


EDGES = [(1, 1), (1, 40), (15, 15), (16, 16), (17, 17), (3, 16), (2, 17), (11, 32), (33, 33), (12, 45)]


@pytest.mark.parametrize(
    ("dtype", "sizes"), [(torch.float32, EDGES), (torch.float16, EDGES[:2]), (torch.bfloat16, EDGES[-2:])]
)
def test_chunks_at_the_edges_of_blocks_and_tiles(dtype: torch.dtype, sizes: list[tuple[int, int]]) -> None:
    spec = make_spec(3, 1, 64)
    case = chunks(spec, sizes, dtype=dtype)
    call = make_call(case, spec)
    run_chunks(call)
    check(call, case, spec)


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 32, 256])
def test_page_sizes(page_size: int) -> None:
    """Pages that are parts of a block, one block, several, and neither."""
    spec = make_spec(2, 1, 64)
    case = chunks(spec, [(1, 33), (9, 40)], page_size=page_size)
    call = make_call(case, spec)
    run_chunks(call)
    check(call, case, spec)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (3, 256), (8, 128), (17, 64), (40, 16)])
def test_groups_and_head_sizes(group: int, head_dim: int) -> None:
    """Groups of more heads than a tile has rows, too."""
    spec = make_spec(group, 1, head_dim)
    case = chunks(spec, [(7, 19)])
    call = make_call(case, spec)
    run_chunks(call)
    check(call, case, spec)


@pytest.mark.parametrize("head_dim", [8, 72, 300])
def test_head_sizes_that_are_no_power_of_two(head_dim: int) -> None:
    spec = make_spec(2, 1, head_dim, sinks=torch.zeros(2, device=DEVICE), softcap=1.0)
    case = chunks(spec, [(20, 33), (1, 1)])
    call = make_call(case, spec)
    run_chunks(call)
    check(call, case, spec)


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules))
def test_windows_caps_and_sinks(rules: dict[str, Any]) -> None:
    spec = make_spec(4, 1, 64, **rules)
    case = chunks(spec, [(1, 60), (37, 37), (16, 48)])
    call = make_call(case, spec, has_lse="softcap" not in rules)
    run_chunks(call)
    check(call, case, spec)


def test_keys_outside_the_window_are_not_read() -> None:
    """Pages of keys that no query of a chunk sees are given back and may hold anything."""
    spec = make_spec(2, 1, 64, sliding_window=20)
    case = chunks(spec, [(9, 90)])
    call = make_call(case, spec)
    for pages in (case.layer_kv.key, case.layer_kv.value):
        pages[case.batch.page_table[0, :3].long()] = torch.nan  # keys 0 to 47; the first query sees 62
        pages[case.batch.page_table[0, 3].long(), :14] = torch.nan
    run_chunks(call)
    check(call, case, spec)


def test_entries_behind_the_keys_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a window shorter than a block the last block may end behind the keys, where the table may end, too."""
    spec = make_spec(2, 1, 64, sliding_window=3)
    case = chunks(spec, [(5, 42)], page_size=1)
    call = make_call(case, spec)
    table = call.batch.page_table
    end = table.data_ptr() + table.numel() * table.element_size()
    load, read = interpreter_builder.create_masked_load, []

    def record(ptrs: Any, mask: Any, *options: Any) -> Any:
        read.extend(ptrs.data[mask.data].tolist())
        return load(ptrs, mask, *options)

    monkeypatch.setattr(interpreter_builder, "create_masked_load", record)
    run_chunks(call)
    check(call, case, spec)
    assert DEVICE == "cuda" or end - table.element_size() in read, "of the last key; a GPU records nothing"
    assert not any(end <= place < end + 4 * CHUNK_LAUNCH.block_len for place in read)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("kv_dtype", FORMATS.values(), ids=FORMATS)
def test_pages_of_few_bits(kv_dtype: torch.dtype, head_dim: int) -> None:
    """Scales of a layer, and of each KV head."""
    spec = make_spec(4, 2, head_dim)
    for scales in ((0.25, 0.5), HEAD_SCALES):
        case = chunks(spec, [(16, 32), (5, 5)], dtype=torch.bfloat16, kv_dtype=kv_dtype, scales=scales)
        call = make_call(case, spec)
        run_chunks(
            call, CHUNK_LAUNCH if kv_dtype != FORMATS["nvfp4"] else dataclasses.replace(CHUNK_LAUNCH, block_len=32)
        )
        check(call, case, spec)


def test_rows_of_the_table_queries_and_chunks_may_stand_anywhere() -> None:
    """As in a captured step: the first tokens are decodes', the last padding, between chunks there are empty ones."""
    spec = make_spec(4, 2, 64)
    case = chunks(spec, [(20, 40), (9, 9), (1, 17)])
    call = make_call(case, spec)
    wide = torch.full((40, 8, 64), torch.nan, device=DEVICE)
    wide[3:33, :4] = case.q
    table = torch.full((9, 5), 10**6, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([7, 8, 2, 5, 8], dtype=torch.int32, device=DEVICE)
    table[[7, 2, 5], 1 : 1 + case.batch.page_table.shape[1]] = case.batch.page_table
    batch = PagedBatch(
        table[:, 1:],
        rows,
        torch.tensor([40, 0, 9, 17, 0], dtype=torch.int32, device=DEVICE),
        16,
        torch.tensor([3, 23, 23, 32, 33, 33], dtype=torch.int32, device=DEVICE),
    )
    out, lse = torch.full((40, 4, 64), torch.nan, device=DEVICE), torch.full((40, 4), torch.nan, device=DEVICE)
    run_chunks(dataclasses.replace(call, q=wide[:, :4], out=out, lse=lse, batch=batch))
    check(dataclasses.replace(call, out=out[3:33], lse=lse[3:33]), case, spec)
    others = [0, 1, 2, *range(33, 40)]
    assert out[others].isnan().all(), "tokens of no chunk are left alone"
    assert lse[others].isnan().all()


def test_pages_with_heads_before_tokens() -> None:
    spec = make_spec(4, 2, 64)
    case = chunks(spec, [(9, 40), (17, 17)])
    call = make_call(case, spec)
    keys, values = (
        pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (call.pages.keys, call.pages.values)
    )
    call = dataclasses.replace(call, pages=KVPages(keys, values))
    run_chunks(call)
    check(call, case, spec)


def test_blocks_of_4_bit_keys_that_would_be_multiplied_wrongly_are_refused() -> None:
    """And those of the plain launch are not among them, in any dtype of queries."""
    for dtype in MAX_ERRORS:
        spec = make_spec(4, 2, 64)
        case = chunks(spec, [(9, 40), (1, 17)], dtype=dtype, kv_dtype=FORMATS["nvfp4"])
        call = make_call(case, spec)
        run_chunks(call, plain_launch(dtype, FORMATS["nvfp4"]))
        check(call, case, spec)
        if dtype != torch.float32:
            with pytest.raises(ValueError, match="block_len: must be 32 or more on such keys, not 16"):
                run_chunks(call, CHUNK_LAUNCH)


def test_what_the_kernel_does_not_serve_is_refused_by_name() -> None:
    spec = make_spec(4, 2, 64)
    call = make_call(chunks(spec, [(9, 40)]), spec)
    tiles = PrefillTiles.allocate(9, 1, 2, 32, call.q.device)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"batch": dataclasses.replace(call.batch, cu_query_lens=None)}, "cu_query_lens: must tell"),
        ({"rules": ScoreRules(-1.0)}, "scale: must be positive, not -1.0"),
    ]
    for change, words in changes:
        with pytest.raises(ValueError, match=words):
            run_prefill(dataclasses.replace(call, **change), CHUNK_LAUNCH, tiles)
    with pytest.raises(ValueError, match="tiles: must be of 64 rows, not 32"):
        run_prefill(call, dataclasses.replace(CHUNK_LAUNCH, tile_rows=64), tiles)
    batch = dataclasses.replace(call.batch, rows=call.batch.rows[:0])
    with pytest.raises(ValueError, match="rows, key_lens: must be of 1 sequences, as cu_query_lens is"):
        dataclasses.replace(call, batch=batch).check()


@pytest.mark.parametrize(
    ("query_lens", "group", "tile_rows", "min_query_len"),
    [
        ([1], 1, 32, 1),
        ([0], 3, 32, 1),
        ([0, 0, 33, 0, 1, 3, 4], 3, 32, 1),
        ([0, 0, 33, 0, 1, 3, 4], 3, 32, 4),
        ([300], 40, 16, 1),
        ([5] * 130, 1, 32, 1),
        ([32, 64, 31, 65], 1, 32, 32),
    ],
    ids=["one query", "nothing", "empty chunks", "short chunks", "one chunk", "many", "edges"],
)
def test_tiles_cover_each_row_once_the_last_of_a_chunk_first(
    query_lens: list[int], group: int, tile_rows: int, min_query_len: int
) -> None:
    tiles = PrefillTiles.allocate(sum(query_lens), len(query_lens), group, tile_rows, torch.device(DEVICE))
    tiles.chunks.fill_(77)
    tiles.first_rows.fill_(-77)
    starts = torch.tensor([7, *query_lens], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    fill_tiles(tiles, starts, group=group, min_query_len=min_query_len)
    expected = [
        (chunk, first_row)
        for chunk, query_len in enumerate(query_lens)
        if query_len >= min_query_len
        for first_row in reversed(range(0, query_len * group, tile_rows))
    ]
    given = list(zip(tiles.chunks.tolist(), tiles.first_rows.tolist(), strict=True))
    assert given[: len(expected)] == expected
    assert all(chunk == -1 for chunk, _ in given[len(expected) :])
