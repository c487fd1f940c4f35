"""Launches of a row of decodes that are worth a measurement, and the steps to measure them by."""

from dataclasses import replace
from itertools import product

from aserve.kernels.cake.architectures import RESERVED_BYTES, SHARED_BYTES
from aserve.kernels.cake.case_pages import GROUP
from aserve.kernels.cake.decode_case import StepSize
from aserve.kernels.cake.decode_variants import DecodeVariant
from aserve.kernels.cake.split_launch import REGISTERS, SplitLaunch
from aserve.kernels.nvfp4 import element_bytes

MAX_SUMS = 128  # that a thread keeps
OTHER_REGISTERS, APART_REGISTERS = 64, 100  # of a thread; where each warp unpacks what it needs
NUM_WARPS, NUM_STAGES, PROGRAMS_PER_SM = (2, 4, 8), (2, 3, 4, 5), (1, 2, 3, 4, 5, 6)
WARPS_PER_SM = range(8, 17)  # fewer leave schedulers idle, more have few registers each
BLOCK_BYTES = (4 << 10, 8 << 10, 16 << 10, 32 << 10)  # of the keys of a block
SIZES = (StepSize(1, 8192), StepSize(8, 4096), StepSize(128, 1024))
FEW_LEN = 4096  # keys of each sequence of a step of few


def step_sizes(row: DecodeVariant, num_queries: int = 1) -> list[StepSize]:
    """Return the steps that a row is measured by: within what it serves, at both ends of it."""
    if row.max_seqs is not None:
        return [StepSize(1, FEW_LEN, num_queries), StepSize(row.max_seqs, FEW_LEN, num_queries)]
    if row.max_keys is not None:
        return [StepSize(1, row.max_keys, num_queries), StepSize(128, row.max_keys, num_queries)]
    return [replace(size, num_queries=num_queries) for size in SIZES]


def candidates(row: DecodeVariant, capability: tuple[int, int], num_queries: int = 1) -> list[SplitLaunch]:
    """Return launches that fit GPUs of ``capability``, the present one first."""
    assert row.launch is not None
    head_dim, kv_dtype = row.head_dims[-1], row.dtypes[-1][1]
    kv_bytes, num_rows = element_bytes(kv_dtype), GROUP * num_queries
    least_len = 16 if kv_bytes > 1 else 32  # keys of few bits are unpacked more at once
    block_lens = [num_bytes // (head_dim * kv_dtype.itemsize) for num_bytes in BLOCK_BYTES]
    if row.max_keys is not None:
        block_lens = [row.max_keys]  # so that no sequence is cut
    launches = [
        replace(row.launch, block_len=block_len, num_warps=num_warps, num_stages=stages, programs_per_sm=programs)
        for block_len, num_warps, stages, programs in product(block_lens, NUM_WARPS, NUM_STAGES, PROGRAMS_PER_SM)
        if least_len <= block_len <= 256 and num_warps * programs in WARPS_PER_SM
    ]
    fitting = [launch for launch in launches if _fits(launch, head_dim, num_rows, kv_bytes, SHARED_BYTES[capability])]
    return list(dict.fromkeys((row.launch, *fitting)))


def _fits(launch: SplitLaunch, head_dim: int, num_rows: int, kv_bytes: float, shared_bytes: int) -> bool:
    """Whether all programs of a multiprocessor find their memory and registers, and none has hardly any copies.

    A step would get them all, too, so that a launch serves as it was timed.
    """
    if launch.count_programs(head_dim, num_rows, kv_bytes, shared_bytes) < launch.programs_per_sm:
        return False
    tile, num_threads = launch.tile_rows(head_dim, num_rows, kv_bytes), 32 * launch.num_warps
    taken = launch.programs_per_sm * (launch.shared_bytes(head_dim, num_rows, kv_bytes) + RESERVED_BYTES)
    if launch.is_apart(head_dim, num_rows, kv_bytes):
        sums, others = tile * (head_dim + launch.block_len // launch.num_warps) // 32, APART_REGISTERS
    else:
        sums, others = tile * (head_dim + launch.block_len) // num_threads, OTHER_REGISTERS
    registers = launch.programs_per_sm * num_threads * (sums + others)
    is_busy = taken * 4 > shared_bytes  # less than a quarter in flight cannot keep the memory busy
    return taken <= shared_bytes + RESERVED_BYTES and sums <= MAX_SUMS and registers <= REGISTERS and is_busy
