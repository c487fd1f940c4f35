"""The cake family's paged decode against dense attention in float64: on a GPU, or on the CPU under the interpreter."""

import dataclasses
from typing import Any

import pytest
import torch
from doubles_attention import MAX_ERRORS, PagedCase, make_case, make_spec
from doubles_cake import DEVICE, FORMATS, RULES, SINKS, check, make_call, run_split
from torch import Tensor

from aserve.attention.base import AttentionSpec
from aserve.kernels.cake.attention_call import AttentionCall, KVPages, ScoreRules
from aserve.kernels.cake.plain_decode import run_plain_decode
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.nvfp4 import NVFP4, BlockScales, element_bytes


def run_plain(call: AttentionCall) -> None:
    call.check()
    run_plain_decode(call)


RUNS = {"split": run_split, "plain": run_plain}


def decodes(spec: AttentionSpec, key_lens: list[int], **options: Any) -> PagedCase:
    return make_case(spec, [1] * len(key_lens), key_lens, len(key_lens), device=DEVICE, **options)


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Any:
    return RUNS[request.param]


@pytest.mark.parametrize("dtype", MAX_ERRORS)
def test_ragged_lengths_at_the_edges_of_blocks(dtype: torch.dtype, run: Any) -> None:
    spec = make_spec(3, 1, 64)
    case = decodes(spec, [1, 15, 16, 17, 90, 33], dtype=dtype)
    call = make_call(case, spec)
    run(call)
    check(call, case, spec)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_page_sizes(page_size: int, run: Any) -> None:
    spec = make_spec(2, 1, 64)
    case = decodes(spec, [40, 1, 70], page_size=page_size)
    call = make_call(case, spec)
    run(call)
    check(call, case, spec)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 96), (1, 128), (3, 256), (8, 128), (17, 64), (20, 80)])
def test_groups_and_head_sizes(group: int, head_dim: int, run: Any) -> None:
    spec = make_spec(group, 1, head_dim)
    case = decodes(spec, [35, 16])
    call = make_call(case, spec)
    run(call)
    check(call, case, spec)


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules))
def test_windows_caps_and_sinks(rules: dict[str, Any], run: Any) -> None:
    spec = make_spec(4, 2, 64, **rules)
    case = decodes(spec, [1, 60, 37])
    call = make_call(case, spec, has_lse="softcap" not in rules)
    run(call)
    check(call, case, spec)


HEAD_SCALES = (torch.tensor([0.25, 2.0], device=DEVICE), torch.tensor([4.0, 0.5], device=DEVICE))


@pytest.mark.parametrize("kv_dtype", FORMATS.values(), ids=FORMATS)
def test_pages_of_few_bits(kv_dtype: torch.dtype, run: Any) -> None:
    """Under the interpreter, which is exact where a GPU multiplies 16 bits."""
    spec = make_spec(4, 2, 64)
    for scales in ((1.0, 1.0), (0.25, 0.5), HEAD_SCALES):
        case = decodes(spec, [16, 32, 5, 47], dtype=torch.bfloat16, kv_dtype=kv_dtype, scales=scales)
        call = make_call(case, spec)
        run(call)
        check(call, case, spec)


@pytest.mark.parametrize("rules", [RULES[1], RULES[-1], {}], ids=lambda rules: "-".join(rules))
@pytest.mark.parametrize("kv_dtype", FORMATS.values(), ids=FORMATS)
def test_pages_of_few_bits_whose_keys_are_dealt_to_warps(kv_dtype: torch.dtype, rules: dict[str, Any]) -> None:
    spec = make_spec(4, 2, 64, **rules)
    case = decodes(spec, [1, 60, 64, 130], kv_dtype=kv_dtype, scales=HEAD_SCALES)
    call = make_call(case, spec)
    launch = SplitLaunch(64, num_warps=2, num_stages=2, programs_per_sm=1)
    assert launch.is_apart(64, call.group, element_bytes(kv_dtype))
    run_split(call, launch=launch)
    check(call, case, spec)


@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_4_bit_pages_of_any_head_size_order_and_rules(head_dim: int, run: Any) -> None:
    if run is run_split and head_dim == 32:
        head_dim = 256
    spec = make_spec(4, 2, head_dim, sliding_window=37, softcap=2.0, sinks=SINKS)
    case = decodes(spec, [1, 60, 37], kv_dtype=NVFP4, scales=HEAD_SCALES)
    call = make_call(case, spec)
    run(call)
    check(call, case, spec)
    pages, blocks = call.pages, call.pages.block_scales
    assert blocks is not None
    keys, values, *others = (
        part.transpose(1, 2).contiguous().transpose(1, 2)
        for part in (pages.keys, pages.values, blocks.key, blocks.value)
    )
    call.out.fill_(torch.nan)
    run(dataclasses.replace(call, pages=KVPages(keys, values, *HEAD_SCALES, BlockScales(*others))))
    check(call, case, spec)


@pytest.mark.parametrize("num_programs", [1, 2, 5, 16, 40])
def test_any_number_of_programs_gives_the_same(num_programs: int) -> None:
    """From all in one to one for each two blocks; a pair cut into more parts than the merge reads at once."""
    spec = make_spec(1, 1, 64)
    case = decodes(spec, [1060, 1, 30] if num_programs == 40 else [150, 1, 30])
    call = make_call(case, spec)
    run_split(call, num_programs)
    check(call, case, spec)


def test_twice_the_same_is_bitwise_the_same() -> None:
    spec = make_spec(4, 2, 64)
    case = decodes(spec, [100, 3, 47], dtype=torch.bfloat16)
    results: list[Tensor] = []
    for _ in range(2):
        call = make_call(case, spec)
        run_split(call)
        results.append(call.out)
    assert torch.equal(*results)


def test_rows_of_the_table_and_queries_may_stand_anywhere(run: Any) -> None:
    spec = make_spec(4, 2, 64)
    case = decodes(spec, [40, 9, 17])
    call = make_call(case, spec)
    wide = torch.full((3, 8, 64), torch.nan, device=DEVICE)
    wide[:, :4] = case.q
    table = torch.full((9, 5), 10**6, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([7, 2, 5], dtype=torch.int32, device=DEVICE)
    table[rows.long(), 1 : 1 + case.batch.page_table.shape[1]] = case.batch.page_table
    batch = dataclasses.replace(call.batch, page_table=table[:, 1:], rows=rows)
    call = dataclasses.replace(call, q=wide[:, :4], batch=batch)
    run(call)
    check(call, case, spec)


def test_pages_with_heads_before_tokens(run: Any) -> None:
    spec = make_spec(4, 2, 64)
    case = decodes(spec, [40, 9, 17])
    call = make_call(case, spec)
    keys, values = (
        pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (call.pages.keys, call.pages.values)
    )
    call = dataclasses.replace(call, pages=KVPages(keys, values))
    run(call)
    check(call, case, spec)


@pytest.mark.parametrize(("head_dim", "group"), [(72, 5), (80, 1), (512, 2)])
def test_the_plain_kernel_takes_any_head_size(head_dim: int, group: int) -> None:
    spec = make_spec(group, 1, head_dim, sinks=torch.zeros(group, device=DEVICE), softcap=1.0)
    case = decodes(spec, [33, 1])
    call = make_call(case, spec)
    run_plain(call)
    check(call, case, spec)


def test_what_no_kernel_serves_is_refused_by_name() -> None:
    spec = make_spec(4, 2, 64)
    call = make_call(decodes(spec, [40, 9]), spec)
    pages, batch = call.pages, call.batch
    changes: list[tuple[dict[str, Any], str]] = [
        ({"q": call.q.transpose(1, 2).contiguous().transpose(1, 2)}, "q: heads of a token"),
        ({"q": call.q[:, :3].contiguous(), "out": call.out[:, :3].contiguous(), "lse": None}, "q: 3 heads"),
        ({"out": call.out.half()}, "out: "),
        ({"lse": torch.zeros(2, 3)}, "lse: must be contiguous float32 [2, 4]"),
        ({"lse": torch.zeros(2, 4, dtype=torch.float16)}, "lse: must be contiguous float32 [2, 4]"),
        ({"pages": KVPages(pages.keys, pages.values.half())}, "values: "),
        ({"pages": KVPages(pages.keys[..., :32], pages.values[..., :32])}, "keys: "),
        ({"pages": KVPages(pages.keys, pages.values, HEAD_SCALES[0])}, "value_scale: must be one for each head"),
        ({"pages": KVPages(pages.keys, pages.values, *[torch.ones(3)] * 2)}, "key_scale, value_scale: must be numbers"),
        (
            {"pages": dataclasses.replace(pages, block_scales=BlockScales(pages.keys, pages.keys))},
            "keys: must be pages of",
        ),
        ({"batch": dataclasses.replace(batch, page_size=8)}, "keys: must be pages of "),
        ({"batch": dataclasses.replace(batch, rows=batch.rows[:1])}, "rows, key_lens: "),
        ({"batch": dataclasses.replace(batch, page_table=batch.page_table.T)}, "page_table: "),
        ({"rules": ScoreRules(1.0, window=0)}, "window: must be 1 or more, the query's own key, not 0"),
        ({"rules": ScoreRules(1.0, softcap=0.0)}, "softcap: must be positive, not 0.0"),
        ({"rules": ScoreRules(1.0, sinks=torch.zeros(3))}, "sinks: must be contiguous float32 [4]"),
        (
            {"rules": ScoreRules(1.0, sinks=torch.zeros(4, dtype=torch.bfloat16))},
            "sinks: must be contiguous float32 [4]",
        ),
        ({"rules": ScoreRules(1.0, sinks=torch.zeros(8)[::2])}, "sinks: must be contiguous float32 [4]"),
    ]
    for change, words in changes:
        with pytest.raises(ValueError, match=words.replace("[", r"\[")):
            dataclasses.replace(call, **change).check()
