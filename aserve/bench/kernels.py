"""``aserve bench kernels``: attention backends on their own, against a float32 reference and the device's limits."""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from aserve.attention.base import AttentionBackend, dtype_name
from aserve.attention.registry import BACKENDS
from aserve.bench.attention_case import AttentionCase, AttentionSetup, StepShape, make_case
from aserve.bench.device_speed import cache_bytes, copy_bandwidth, matmul_rate, synchronize, time_calls
from aserve.bench.report import format_table, print_result
from aserve.config import Config
from aserve.errors import ClientError
from aserve.kernels.nvfp4 import NVFP4
from aserve.runner.resolve import resolve_device, resolve_num_threads

SHAPES: dict[str, dict[str, Sequence[str]]] = {
    "cuda": {"decode": ("1x1024", "8x4096", "128x1024", "256x840"), "prefill": ("1x512", "8x2048", "1x16384")},
    "cpu": {"decode": ("1x512", "8x512"), "prefill": ("1x128", "1x128+512")},
}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
MIN_COPIES, MAX_COPIES = 4, 64  # of the pages that calls go through in turn
CACHE_TURNS = 2  # times the cache's size that they take together

Row = dict[str, Any]


@torch.inference_mode()
def run(arguments: argparse.Namespace, config: Config) -> int:
    """Measure and print; returns 1 if a kernel failed."""
    device = resolve_device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(resolve_num_threads(config.engine.num_threads))
    names = arguments.backends or BACKENDS.names
    if unknown := set(names) - set(BACKENDS.names):
        raise ClientError(f"unknown attention backend {min(unknown)!r}; known: {', '.join(BACKENDS.names)}")
    limits = {"copy_gb_s": copy_bandwidth(device) / 1e9}
    rows: list[Row] = []
    refusals: list[Row] = []
    for setup in _setups(arguments, device):
        limits.setdefault(f"matmul_{dtype_name(setup.dtype)}_tflop_s", matmul_rate(device, setup.dtype) / 1e12)
        for shape in _shapes(arguments, device):
            case = make_case(setup, shape)
            reference = case.reference()
            for name in names:
                row = measure_backend(name, case, shape, reference, arguments.rounds)
                (refusals if "refused" in row else rows).append(row)
    for row in rows:
        if "time_us" in row:
            row["of_copy"] = row["gb_s"] / limits["copy_gb_s"]
            row["of_matmul"] = row["tflop_s"] / limits[f"matmul_{row['dtype']}_tflop_s"]
    result = {"device": _device_name(device), "limits": limits, "results": rows, "refused": refusals}
    print_result(result, format_result(result), arguments.json)
    return int(any("failed" in row for row in rows))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def _setups(arguments: argparse.Namespace, device: torch.device) -> Iterator[AttentionSetup]:
    dtype = getattr(torch, arguments.query_dtype) if arguments.query_dtype else DTYPES[device.type]
    kv_dtype = dtype
    if arguments.kv_dtype:
        kv_dtype = NVFP4 if arguments.kv_dtype == "nvfp4" else getattr(torch, arguments.kv_dtype)
    for num_heads, num_kv_heads in arguments.heads:
        for head_dim in arguments.head_dim:
            for page_size in arguments.page_sizes:
                yield AttentionSetup(device, dtype, kv_dtype, num_heads, num_kv_heads, head_dim, page_size)


def _shapes(arguments: argparse.Namespace, device: torch.device) -> list[StepShape]:
    """Return the given shapes; if none are given, some that are usual on ``device``."""
    given: dict[str, Sequence[str]] = {"decode": arguments.decode or (), "prefill": arguments.prefill or ()}
    chosen = given if any(given.values()) else SHAPES[device.type]
    try:
        return [StepShape.parse(phase, text) for phase in ("decode", "prefill") for text in chosen[phase]]
    except ValueError as error:
        raise ClientError(str(error)) from None


def measure_backend(name: str, case: AttentionCase, shape: StepShape, reference: torch.Tensor, rounds: int) -> Row:
    """Return what one backend made of a case, or why it did not take it (``refused``) or broke (``failed``)."""
    setup = case.setup
    row: Row = {
        "backend": name,
        "phase": shape.phase,
        "shape": str(shape),
        "heads": f"{setup.num_heads}/{setup.num_kv_heads} x {setup.head_dim}",
        "page": setup.page_size,
        "dtype": dtype_name(setup.dtype),
        "kv_dtype": dtype_name(setup.kv_dtype),
    }
    if reason := BACKENDS.refusals()[name]:
        return row | {"refused": reason}
    backend_class = BACKENDS.load(name)
    problem = setup.problem(shape)
    if reason := backend_class.refuse(problem, shape.phase):
        return row | {"refused": reason}
    try:
        backend = backend_class(problem, setup.device, (shape.phase,))
        return row | _measure(backend, case, shape, reference, rounds)
    except Exception as error:  # a foreign kernel can raise anything, and the others are still to be measured
        return row | {"failed": f"{type(error).__name__}: {error}"}


def _measure(
    backend: AttentionBackend, case: AttentionCase, shape: StepShape, reference: torch.Tensor, rounds: int
) -> Row:
    setup = case.setup
    spec, plan = setup.spec, backend.plan(case.batch)
    copies = [case.in_order(backend.kv_order) for _ in range(_num_copies(case))]
    output, _ = backend.forward(case.queries, copies[0], plan, spec)
    error = output.float() - reference
    calls: list[Callable[[], object]] = [
        partial(backend.forward, case.queries, layer_kv, plan, spec) for layer_kv in copies
    ]
    seconds = time_calls(setup.device, calls, rounds)
    return {
        "kernel": backend.kernel_name(plan, spec),
        "max_error": error.abs().max().item(),
        "rel_error": (error.norm() / reference.norm()).item(),
        "time_us": 1e6 * seconds,
        "plan_us": 1e6 * median(_time_plan(backend, case) for _ in range(rounds)),
        "gb_s": setup.moved_bytes(shape) / seconds / 1e9,
        "tflop_s": setup.operations(shape) / seconds / 1e12,
    }


def _num_copies(case: AttentionCase) -> int:
    """Return how many layers' pages calls go through, so that each finds none of its own in the cache."""
    size = 2 * case.layer_kv.key.numel() * case.layer_kv.key.element_size()
    return min(MAX_COPIES, max(MIN_COPIES, math.ceil(CACHE_TURNS * cache_bytes(case.setup.device) / size)))


def _time_plan(backend: AttentionBackend, case: AttentionCase) -> float:
    """Return the seconds that the host takes to plan a step, once for all layers."""
    synchronize(case.setup.device)
    start_s = time.perf_counter()
    backend.plan(case.batch)
    return time.perf_counter() - start_s


def format_result(result: Row) -> str:
    """Lay results out for a terminal: the device's limits, a table, then what was refused and why."""
    limits = ", ".join(f"{name}: {value:.4g}" for name, value in result["limits"].items())
    blocks = [f"{result['device']}; {limits}"]
    if measured := [row for row in result["results"] if "failed" not in row]:
        blocks.append(format_table(measured))
    lines = [
        f"{row['backend']} failed at {row['phase']} {row['shape']}, {row['heads']}, page {row['page']}: {row['failed']}"
        for row in result["results"]
        if "failed" in row
    ]
    phases: dict[tuple[str, str], dict[str, None]] = {}  # in order, each once
    for row in result["refused"]:
        phases.setdefault((row["backend"], row["refused"]), {})[row["phase"]] = None
    lines += [f"{name} refused for {', '.join(refused)}: {reason}" for (name, reason), refused in phases.items()]
    if lines:
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
