"""How long work takes on a device, and what the device can do at best: copies and matrix products."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
CPU_CACHE_BYTES = 64 << 20  # at least what the shared caches of servers hold
SPIN_CYCLES_PER_S = 2e9  # more than GPUs have, so that a spin is rather too long


def cache_bytes(device: torch.device) -> int:
    """Return the size of the cache that all cores of ``device`` share."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return CPU_CACHE_BYTES


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what was enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(device: torch.device, calls: Sequence[Callable[[], object]], num_rounds: int) -> float:
    """Return the seconds of one call: the median over rounds of all ``calls`` in turn, after a round to warm up.

    On a GPU the round waits behind a spinning kernel until it is enqueued, so that the host's time does not count.
    """
    host_s = _enqueue(calls)
    synchronize(device)
    host_s = _enqueue(calls)  # the first may have compiled something
    synchronize(device)
    time_round = _time_cuda_round if device.type == "cuda" else _time_cpu_round
    return median(time_round(calls, host_s) for _ in range(num_rounds)) / len(calls)


def _enqueue(calls: Sequence[Callable[[], object]]) -> float:
    start_s = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start_s


def _time_cpu_round(calls: Sequence[Callable[[], object]], host_s: float) -> float:
    return _enqueue(calls)


def _time_cuda_round(calls: Sequence[Callable[[], object]], host_s: float) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda._sleep(int(2 * host_s * SPIN_CYCLES_PER_S))  # type: ignore[no-untyped-call]
    start.record()
    _enqueue(calls)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def copy_bandwidth(device: torch.device, num_rounds: int = 5) -> float:
    """Return bytes per second of a large copy, read and written."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_calls(device, [lambda: target.copy_(source)], num_rounds)


def matmul_rate(device: torch.device, dtype: torch.dtype, num_rounds: int = 5) -> float:
    """Return operations per second of a large matrix product."""
    size = MATRIX_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / time_calls(device, [lambda: a @ b], num_rounds)
