"""How many programs of the split decode share a multiprocessor: never more than run at once, whatever the group."""

import pytest

from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS
from aserve.kernels.nvfp4 import element_bytes

SM_BYTES, SM_REGISTERS = 228 << 10, 1 << 16  # of compute capability 9.0, by NVIDIA's programming guide
RESERVED_BYTES = 1 << 10  # for each thread block
ROWS = {row.name: row for row in DECODE_VARIANTS if row.launch is not None}


def count(name: str, group: int) -> int:
    row = ROWS[name]
    assert row.launch is not None
    kv_bytes = element_bytes(row.dtypes[-1][1])
    return row.launch.count_programs(row.head_dims[-1], group, kv_bytes, SHARED_BYTES[9, 0])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_rows_of_usual_groups_get_what_their_launch_wants(name: str, group: int) -> None:
    launch = ROWS[name].launch
    assert launch is not None
    assert count(name, group) == launch.programs_per_sm


@pytest.mark.parametrize(
    ("name", "group", "shared_bytes", "registers"),  # that the compiler takes for Hopper
    [
        ("decode-16-d64", 64, 107_520, 181),
        ("decode-16-d128", 64, 115_200, 177),
        ("decode-16-d256", 32, 84_224, 184),
        ("decode-8-d64", 32, 62_464, 229),
        ("decode-8-d64", 64, 58_368, 220),
        ("decode-8-d128", 32, 61_952, 250),
        ("decode-8-d128", 64, 74_240, 255),
        ("decode-8-d256", 32, 119_296, 184),
        ("decode-4-d64", 64, 44_032, 234),
        ("decode-4-d128", 32, 47_616, 231),
        ("decode-4-d128", 64, 59_904, 255),
        ("decode-4-d256", 32, 91_136, 224),
    ],
)
def test_rows_of_the_largest_groups_get_as_many_as_fit(
    name: str, group: int, shared_bytes: int, registers: int
) -> None:
    launch = ROWS[name].launch
    assert launch is not None
    by_memory = SM_BYTES // (shared_bytes + RESERVED_BYTES)
    by_registers = SM_REGISTERS // (32 * launch.num_warps * -(-registers // 8) * 8)
    assert count(name, group) == min(launch.programs_per_sm, by_memory, by_registers)
