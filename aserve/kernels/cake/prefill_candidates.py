"""Launches of a row of prompts that are worth a measurement, and the steps to measure them by."""

from itertools import product

from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.case_pages import GROUP
from aserve.kernels.cake.prefill_case import ChunkSize
from aserve.kernels.cake.prefill_launch import PrefillLaunch
from aserve.kernels.cake.prefill_variants import PrefillVariant
from aserve.kernels.cake.variant import least_block_len, row_width
from aserve.kernels.nvfp4 import element_bytes

MAX_SUMS = 160  # that a thread keeps
# a short prompt, long ones, and short ones behind much that is there
SIZES = (ChunkSize(1, 512), ChunkSize(4, 2048), ChunkSize(8, 64, 2048))


def candidates(row: PrefillVariant, capability: tuple[int, int]) -> list[PrefillLaunch]:
    """Return launches that fit GPUs of ``capability``, the present one first."""
    assert row.launch is not None
    dtype, kv_dtype = row.dtypes[-1]
    head_dim, kv_bytes = row.head_dims[-1], element_bytes(kv_dtype)
    launches = [PrefillLaunch(*shape) for shape in product((32, 64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4))]
    fitting = [
        launch
        for launch in launches
        if launch.block_len >= least_block_len(dtype, kv_bytes)
        and launch.shared_bytes(head_dim, GROUP, kv_bytes) <= SHARED_BYTES[capability]
        and launch.tile_rows * (row_width(head_dim) + launch.block_len) <= MAX_SUMS * 32 * launch.num_warps
    ]
    return list(dict.fromkeys((row.launch, *fitting)))
