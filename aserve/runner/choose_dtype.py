"""Whether bfloat16 pays on this CPU: instruction flags alone do not settle it, so linear layers are timed."""

import logging
import time
from typing import Literal

import torch
from torch import Tensor

from aserve.attention.base import dtype_name
from aserve.quantization.base import QuantMethod
from aserve.runner.resolve import log_choice

logger = logging.getLogger(__name__)

SIZE = 1024  # features in and out of a timed layer
NUM_LAYERS = 12  # 48 MiB in float32, more than caches hold
ROW_COUNTS = {1: 16, 8: 8, 128: 1}  # rows of a step -> how often it counts: decodes alone, some together, a chunk
NUM_TURNS = 3
MARGIN = 1.05  # bfloat16 must be faster by this factor

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


def resolve_dtype(setting: DtypeName, device: torch.device, method: QuantMethod) -> torch.dtype:
    """Return the type of weights and activations; on a CPU the timing decides, or warns about what was set."""
    if device.type == "cuda":
        dtype = torch.bfloat16 if setting == "auto" else getattr(torch, setting)
        log_choice("dtype", dtype_name(dtype), "as set" if setting != "auto" else "default on a GPU")
        return dtype
    if setting == "float32":
        log_choice("dtype", setting, "as set")
        return torch.float32
    wanted = torch.bfloat16 if setting == "auto" else getattr(torch, setting)
    float32_s, wanted_s = time_linears(method, (torch.float32, wanted))
    ratio = float32_s / wanted_s
    reason = f"{dtype_name(wanted)} is {ratio:.2f} times as fast as float32 in linear layers here"
    if setting == "auto":
        dtype = wanted if ratio >= MARGIN else torch.float32
        log_choice("dtype", dtype_name(dtype), reason)
        return dtype
    if ratio < 1:
        logger.warning("dtype=%s as set, but %s", setting, reason)
    else:
        log_choice("dtype", setting, f"as set; {reason}")
    return wanted


@torch.inference_mode()
def time_linears(method: QuantMethod, dtypes: tuple[torch.dtype, ...]) -> list[float]:
    """Return the weighted seconds of linear layers in each type; types take turns, the best turn counts.

    On one thread: several wait for each other, for as long as another process keeps one of them from running.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _time_in_turn(method, dtypes)
    finally:
        torch.set_num_threads(num_threads)


def _time_in_turn(method: QuantMethod, dtypes: tuple[torch.dtype, ...]) -> list[float]:
    weight = torch.randn(SIZE, SIZE)
    layers = [_copy_layers(method.pack(weight, dtype)) for dtype in dtypes]
    totals = [0.0] * len(dtypes)
    for num_rows, count in ROW_COUNTS.items():
        rows = [torch.randn(num_rows, SIZE).to(dtype) for dtype in dtypes]
        best_s = [float("inf")] * len(dtypes)
        for _ in range(NUM_TURNS):
            for i in range(len(dtypes)):
                best_s[i] = min(best_s[i], _time_pass(method, layers[i], rows[i]))
        totals = [total + count * seconds for total, seconds in zip(totals, best_s, strict=True)]
    return totals


def _copy_layers(packed: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: tensor.clone() for name, tensor in packed.items()} for _ in range(NUM_LAYERS)]


def _time_pass(method: QuantMethod, layers: list[dict[str, Tensor]], rows: Tensor) -> float:
    started_at_s = time.thread_time()  # of this thread, so that other processes do not count
    for packed in layers:
        method.apply(rows, packed, None)
    return time.thread_time() - started_at_s
