"""Which calls of the GPU backends work on this machine: prints a line each. Run with PYTHONPATH=.:tests."""

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from doubles_attention import CapturedCase, PagedCase, make_case, make_spec
from doubles_attention_gpu import CapturedRun, build, has_lse, run_eagerly, settings_here

from aserve.attention.base import AttentionSpec, CaptureShape, StepLens

BF16 = torch.bfloat16
LENS = [1, 15, 16, 17, 257, 4096]


def decodes(spec: AttentionSpec, key_lens: list[int], **options: Any) -> PagedCase:
    return make_case(spec, [1] * len(key_lens), key_lens, len(key_lens), device="cuda", dtype=BF16, **options)


def mixed(spec: AttentionSpec, **options: Any) -> PagedCase:
    return make_case(spec, [1, 1, 1, 30, 17, 300], [1, 33, 257, 30, 50, 700], 3, device="cuda", dtype=BF16, **options)


def captured(setting: str, shape: CaptureShape, cases: list[PagedCase], spec: AttentionSpec) -> str:
    run = CapturedRun(build(setting, cases[0], spec), shape, cases, spec, return_lse=has_lse(setting))
    errors = [run.replay(case) for case in cases]
    return f"{len(cases)} steps, {max(errors)}"


def plan_time(setting: str) -> str:
    """The host's part of a replay of 320 and 319 decodes; the device is idle, so nothing is waited for."""
    spec = make_spec(32, 8, 128)
    case = decodes(spec, [500] * 320)
    backend = build(setting, case, spec, max_num_seqs=320)
    tables = CapturedCase.make(CaptureShape(320, 320, 0), 300, 16, "cuda")
    plan = backend.prepare_capture(tables.shape, tables.tables)
    full = tables.fill(case, 0)
    steps = (full, StepLens(full.key_lens, full.cu_query_lens - 1))
    times = []
    for i in range(50):
        start = time.perf_counter()
        backend.prepare_replay(plan, steps[i % 2])
        times.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
    size = f"{backend.workspace_bytes >> 20} MiB"
    return f"median {statistics.median(times):.0f} us, largest {max(times):.0f} us, workspaces {size}"


def checks(setting: str) -> dict[str, Callable[[], Any]]:
    wide, narrow, plain = make_spec(32, 8, 128), make_spec(14, 2, 64), make_spec(16, 8, 128)
    windowed = make_spec(32, 8, 128, sliding_window=100)
    capped = make_spec(8, 2, 256, softcap=20.0)
    fp8: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "scales": (0.25, 0.5)}
    decode_shape, mixed_shape = CaptureShape(8, 8, 0), CaptureShape(512, 64, 32)

    def steps(spec: AttentionSpec) -> list[PagedCase]:
        return [decodes(spec, lens) for lens in (LENS, [1], [5000, 3, 40], [9] * 8, [70] * 7)]

    def mixed_steps(spec: AttentionSpec, **options: Any) -> list[PagedCase]:
        sizes = [
            ([1, 1, 7], [9, 40, 7], 2),
            ([400], [900], 0),
            ([1] * 9 + [2, 1], [33] * 9 + [2, 65], 9),
            ([1] * 40, [100] * 40, 40),
            ([7] * 32, [50] * 32, 0),
        ]
        others = [make_case(spec, *size, device="cuda", dtype=BF16, **options) for size in sizes]
        return [mixed(spec, **options), *others, mixed(spec, seed=5, **options)]

    common: dict[str, Callable[[], Any]] = {
        "decodes g4 d128": lambda: run_eagerly(setting, decodes(wide, LENS), wide),
        "decodes 40,000 keys": lambda: run_eagerly(setting, decodes(wide, [40_000, 1]), wide),
        "chunk of 40,000 keys": lambda: run_eagerly(
            setting, make_case(wide, [5], [40_000], 0, device="cuda", dtype=BF16), wide
        ),
        "mixed g4": lambda: run_eagerly(setting, mixed(wide), wide),
        "mixed g4 page 64": lambda: run_eagerly(setting, mixed(wide, page_size=64), wide),
        "captured decodes g4": lambda: captured(setting, decode_shape, steps(wide), wide),
        "captured decodes g4 of 66+": lambda: captured(setting, CaptureShape(64, 64, 0), steps(wide), wide),
        "captured mixed g4": lambda: captured(setting, mixed_shape, mixed_steps(wide), wide),
        "plan of 320": lambda: plan_time(setting),
    }
    if "trtllm" in setting:
        return common
    return common | {
        "decodes g2 d128": lambda: run_eagerly(setting, decodes(plain, LENS), plain),
        "decodes g7 d64 page 1": lambda: run_eagerly(setting, decodes(narrow, LENS, page_size=1), narrow),
        "mixed g7 d64 page 64": lambda: run_eagerly(setting, mixed(narrow, page_size=64), narrow),
        "mixed window": lambda: run_eagerly(setting, mixed(windowed), windowed),
        "mixed softcap d256": lambda: run_eagerly(setting, mixed(capped), capped),
        "captured decodes g2": lambda: captured(setting, decode_shape, steps(plain), plain),
        "captured mixed g2": lambda: captured(setting, mixed_shape, mixed_steps(plain), plain),
        "captured mixed window": lambda: captured(setting, mixed_shape, mixed_steps(windowed), windowed),
        "fp8 decodes g4": lambda: run_eagerly(setting, decodes(wide, LENS, **fp8), wide),
        "fp8 mixed g4": lambda: run_eagerly(setting, mixed(wide, **fp8), wide),
        "fp8 mixed g2": lambda: run_eagerly(setting, mixed(plain, **fp8), plain),
        "fp8 captured mixed g4": lambda: captured(setting, mixed_shape, mixed_steps(wide, **fp8), wide),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", help="default: all that are usable here")
    parser.add_argument("--traceback", action="store_true")
    arguments = parser.parse_args()
    for setting in arguments.settings or settings_here():
        for name, check in checks(setting).items():
            start = time.perf_counter()
            try:
                result = f"ok {check()}"
            except Exception as error:
                result = f"ERROR {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                if arguments.traceback:
                    traceback.print_exc()
            print(f"{setting:10} {name:28} {time.perf_counter() - start:6.2f} s  {result}", flush=True)


if __name__ == "__main__":
    main()
