"""Pages of the cake family's kernels that begin 2^31 elements or more into their pool, past what 32 bits count.

A pool stands in the second half of what is mapped for it, so that an offset that wrapped would still be read, as zeros.
Hardly any of it is touched, so it takes addresses rather than memory.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from doubles_attention import PagedCase, make_case, make_spec
from doubles_cake import DEVICE, check, chunks, make_call, run_chunks, run_split
from torch import Tensor

from aserve.kernels.cake.attention_call import AttentionCall, KVPages
from aserve.kernels.cake.plain_decode import run_plain_decode
from aserve.kernels.cake.split_launch import SplitLaunch

REACH = 2**31
SPEC = make_spec(2, 1, 64)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
MoveFar = Callable[[PagedCase, int], AttentionCall]


def decodes(kv_dtype: torch.dtype) -> PagedCase:
    return make_case(SPEC, [1, 1], [20, 37], 2, dtype=BF16, kv_dtype=kv_dtype, device=DEVICE)


@pytest.fixture
def move_far(tmp_path: Path) -> MoveFar:
    """Return what moves the pages of a case past REACH units of so many bytes."""

    def reserve(num_bytes: int) -> Tensor:
        if DEVICE == "cuda":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
        return torch.from_file(str(tmp_path / "pool"), shared=True, size=num_bytes, dtype=torch.uint8)  # type: ignore[no-any-return]

    def move(case: PagedCase, unit_bytes: int) -> AttentionCall:
        parts = case.layer_kv.key, case.layer_kv.value
        num_pages, *page_shape = parts[0].shape
        page_bytes = 2 * parts[0][0].nbytes  # keys and values of a page stand side by side
        first = REACH * unit_bytes // page_bytes
        mapped = reserve((2 * first + num_pages) * page_bytes)
        pool = mapped[first * page_bytes :].view(parts[0].dtype).view(first + num_pages, 2, *page_shape)
        for place, part in enumerate(parts):
            pool[first:, place].view(torch.uint8).copy_(part.view(torch.uint8))
        case.batch = dataclasses.replace(case.batch, page_table=case.batch.page_table + first)
        return dataclasses.replace(make_call(case, SPEC), pages=KVPages(pool[:, 0], pool[:, 1]))

    return move


def test_chunks(move_far: MoveFar) -> None:
    case = chunks(SPEC, [(3, 20)], dtype=BF16, kv_dtype=FP8)
    call = move_far(case, 1)
    run_chunks(call)
    check(call, case, SPEC)


def test_decodes_of_the_plain_kernel(move_far: MoveFar) -> None:
    case = decodes(FP8)
    call = move_far(case, 1)
    call.check()
    run_plain_decode(call)
    check(call, case, SPEC)


@pytest.mark.parametrize(("kv_dtype", "unit_bytes"), [(BF16, 2), (FP8, 4)], ids=["together", "apart"])
def test_decodes_of_both_split_loops(kv_dtype: torch.dtype, unit_bytes: int, move_far: MoveFar) -> None:
    """Warps share keys of 16 bits; on words of four elements each has its own."""
    case = decodes(kv_dtype)
    call = move_far(case, unit_bytes)
    launch = SplitLaunch(64, num_warps=4, num_stages=2, programs_per_sm=1)
    assert launch.is_apart(64, call.group, kv_dtype.itemsize) == (unit_bytes == 4)
    run_split(call, launch=launch)
    check(call, case, SPEC)
