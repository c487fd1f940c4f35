"""What the compiler makes of the cake family's kernels for chunks for a Hopper GPU, for which none is needed."""

from pathlib import Path

import pytest
from doubles_hopper import compile_by

from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.decode_variants import SEVERAL_VARIANTS
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS
from aserve.kernels.nvfp4 import element_bytes

SCRIPT = Path(__file__).with_name("hopper_compile_cake_prefill.py")
RESERVED_BYTES = 1 << 10  # for each thread block
SEVERAL_ROWS = {row.name: row for row in SEVERAL_VARIANTS}
ROWS = {row.name: row for row in PREFILL_VARIANTS}
USUAL = ("prefill-16-d64+", "prefill-16-d128", "prefill-8-d256")
SPILLED_BYTES = {"prefill-8-d256+": 8, "prefill-4-d256": 24, "prefill-4-d256+": 48}  # a few registers
OTHERS = sorted({f"{name}{end}" for name in ROWS for end in ("", "+")} - set(USUAL))


def check(asked: tuple[str, ...], cache: Path) -> None:
    """Compile the rows, each for three steps, and look at what came of it; the plain one only has to fit."""
    reports = compile_by(SCRIPT, cache, *asked)
    kernels = {name: [line for line in reports if line["asked"] == name] for name in asked}
    for name, lines in kernels.items():
        assert [line["kernel"] for line in lines] == ["_fill_tiles", "paged_prefill"] * 3
        assert not any(line["is_new"] for line in lines[2:]), "another step compiles nothing"
        line, row = lines[1], ROWS[name.rstrip("+")]
        if row.launch is None:
            assert line["shared_bytes"] <= min(SHARED_BYTES.values()), "it fits any GPU"
            continue
        assert line["spilled_bytes"] <= SPILLED_BYTES.get(name, 0), line
        assert line["group_products"], "warp groups multiply"
        assert not line["warp_products"], line
        assert not line["roundings"], "8 bits become 16 in one instruction"
        assert line["copies"].count("10") >= 8, "16 bytes at a time, in hexadecimal"
        num_loops = 3 if name.endswith("+") else 2
        under_way = [count for count in line["under_way"] if count]
        assert len(under_way) == num_loops
        least = 2 * (row.launch.num_stages - 2)  # keys and values are under way while others are used
        most = 2 * least if name.startswith("prefill-4") else least  # in nvfp4 their scales may be, too
        assert all(least <= count <= most for count in under_way), line
        bound = row.launch.shared_bytes(row.head_dims[-1], 4, element_bytes(row.dtypes[-1][1]))
        assert line["shared_bytes"] <= bound <= SHARED_BYTES[9, 0]


def test_rows_compile_to_products_of_warp_groups_without_spilling(tmp_path: Path) -> None:
    check(USUAL, tmp_path)


def check_several(name: str, cache: Path) -> None:
    """The same for a row of few queries, with a full tile."""
    lines = compile_by(SCRIPT, cache, name)
    assert [line["kernel"] for line in lines] == ["_fill_schedule", "split_decode", "merge_decode"] * 3
    assert not any(line["is_new"] for line in lines[3:]), "another step compiles nothing"
    assert not any(line["spilled_bytes"] for line in lines), lines
    assert all(line["early_starts"] for line in lines[1:3]), "the merge starts before the split has ended"
    line, row = lines[1], SEVERAL_ROWS[name.rstrip("+")]
    assert row.launch is not None
    assert line["copies"].count("10") >= (4 if "-4-" in name else 8), "16 bytes at a time, in hexadecimal"
    bound = row.launch.shared_bytes(row.head_dims[-1], row.max_group, element_bytes(row.dtypes[-1][1]))
    assert line["shared_bytes"] <= bound
    assert row.launch.programs_per_sm * (bound + RESERVED_BYTES) <= SHARED_BYTES[9, 0] + RESERVED_BYTES


def test_a_row_of_few_queries_compiles_without_spilling(tmp_path: Path) -> None:
    check_several("several-16-d128+", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", SEVERAL_ROWS)
def test_all_rows_of_few_queries_do(name: str, tmp_path: Path) -> None:
    check_several(name + "+", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("asked", OTHERS)
def test_all_rows_with_and_without_rules_do(asked: str, tmp_path: Path) -> None:
    check((asked,), tmp_path)
