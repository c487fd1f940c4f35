"""The C kernels in every variant that this machine can run, each compiled once and kept in the cache folder.

With KERNEL_FLAGS in the environment there is one variant, the native one with these flags (for sanitizers).
"""

import ctypes
import os
import platform
from functools import cache

import torch

from aserve.kernels.cpu.bindings import CpuKernels
from aserve.kernels.cpu.library import build, cpu_features, native_flags

AVX2 = "-march=x86-64-v3"
VNNI = ("-mavx512vnni", "-mavx512vl", "-mavx512bw")


def variants() -> dict[str, tuple[str, ...]]:
    """Name -> flags; "native" first."""
    if extra := os.environ.get("KERNEL_FLAGS"):
        return {"native": (*native_flags(), *extra.split())}
    found = {"native": native_flags()}
    if platform.machine().lower() in ("x86_64", "amd64"):
        found["avx2"] = (AVX2,)
        if "avx512_vnni" in cpu_features():
            found["avx2-vnni"] = (AVX2, *VNNI, "-DASERVE_LANES=8")
    found["portable"] = (*native_flags(), "-DASERVE_PORTABLE")
    return found


@cache
def load_variant(name: str) -> CpuKernels:
    return CpuKernels(ctypes.CDLL(str(build(variants()[name]))))


class Threads:
    """Runs a block with another number of torch threads, which is the number the kernels take."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self._before)
