"""The C functions as Python calls: argument types, thread pools, and which calls keep the interpreter lock."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from aserve.kernels.cpu.library import KernelError, load_kernels

Function = Callable[..., int]

POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

ARGUMENTS: dict[str, tuple[type, ...]] = {
    "int8_linear": (POINTER, POINTER, LONG, INT, INT, POINTER, POINTER, POINTER, POINTER, INT),
    "int8_rows": (POINTER, POINTER, POINTER, INT, INT, POINTER),
    "rms_norm": (POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT, FLOAT),
    "silu_mul": (POINTER, POINTER, POINTER, INT, INT),
    "gelu_mul": (POINTER, POINTER, POINTER, INT, INT),
    "rope": (POINTER, LONG, INT, POINTER, LONG, INT, INT, POINTER, POINTER, INT),
    "store_kv": (POINTER, LONG, POINTER, LONG, POINTER, POINTER, POINTER, INT, INT),
    "paged_attention": (POINTER, POINTER),
}


class AttentionArguments(ctypes.Structure):
    """``AttentionArguments`` of attention.c, field by field."""

    _fields_ = (
        ("q", POINTER),
        ("output", POINTER),
        ("lse", POINTER),
        ("key", POINTER),
        ("value", POINTER),
        ("page_table", POINTER),
        ("cu_query_lens", POINTER),
        ("key_lens", POINTER),
        ("sinks", POINTER),
        ("q_stride", LONG),
        ("table_stride", LONG),
        ("kv_type", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("num_decodes", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", FLOAT),
        ("softcap", FLOAT),
    )


class CpuKernels:
    """One loaded library and its thread pools.

    Each function exists twice: ``brief`` keeps the interpreter lock, which is cheaper than giving it
    away and asking a busy event loop for it again; ``long`` releases it, for calls that take so long that the loop
    would miss it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.long = _bind(library)
        self.brief = _bind(ctypes.PyDLL(library._name))
        library.pool_create.restype = POINTER
        library.pool_create.argtypes = (INT,)
        self._create_pool = library.pool_create
        self._pools: dict[int, int] = {}

    def pool(self) -> int:
        """Return the address of the pool with as many threads as torch uses on this thread; they live for ever."""
        num_threads = torch.get_num_threads()
        pool = self._pools.get(num_threads)
        if pool is None:
            pool = self._pools.setdefault(num_threads, self._create_pool(num_threads) or 0)
            if not pool:
                raise KernelError("no memory for the kernels' threads")
        return pool


class Functions:
    """The functions of ARGUMENTS as attributes."""

    int8_linear: Function
    int8_rows: Function
    rms_norm: Function
    silu_mul: Function
    gelu_mul: Function
    rope: Function
    store_kv: Function
    paged_attention: Function


def _bind(library: ctypes.CDLL) -> Functions:
    functions = Functions()
    for name, argtypes in ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = INT if name in ("int8_linear", "paged_attention") else None
        setattr(functions, name, function)
    return functions


@cache
def cpu_kernels() -> CpuKernels:
    """Return the kernels for this machine. Raises KernelError where ``refusal`` has a reason."""
    return CpuKernels(load_kernels())
