"""``python -m aserve.kernels.cake.tune``: measures launches of the family's rows on the GPU here and writes its file.

Each row is tried on steps at both ends of what it serves; what counts is the mean of its times relative to those of the
present launch, which stays unless another is faster by more than 1.5 %. Rows that are not tried keep what the file has.
Launches are compiled by all cores first. On what is written, see tuned_launches.py.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean

import torch
from triton.runtime.errors import OutOfResources

from aserve.kernels.cake.decode_candidates import candidates, step_sizes
from aserve.kernels.cake.decode_case import DecodeCase, StepSize
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, DecodeVariant
from aserve.kernels.cake.select_variant import refuse_gpu
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.cake.tuned_launches import FOLDER, file_name, format_launches, read_launches, tune_rows

DEVICE = torch.device("cuda")
MIN_GAIN = 0.015
SMALLEST = StepSize(1, 16)  # enough to compile for


def main(argv: Sequence[str] | None = None) -> int:
    """Tune, print and write; returns 1 on a machine without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in DECODE_VARIANTS if row.launch is not None]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the file of this GPU in the package")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile (default: all cores)")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tune: torch finds no CUDA device", file=sys.stderr)
        return 1
    gpu_name, capability = torch.cuda.get_device_name(DEVICE), torch.cuda.get_device_capability(DEVICE)
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    output = arguments.output or FOLDER / file_name(gpu_name)
    present = tune_rows(DECODE_VARIANTS, gpu_name, capability)
    rows = [row for row in present if row.name in arguments.rows and refuse_gpu(row, capability) is None]
    compile_all(rows, capability, arguments.jobs)
    tuned = []
    for row in rows:
        cases = [DecodeCase(row, size, DEVICE) for size in step_sizes(row)]
        tuned.append(replace(row, launch=tune_row(row, cases, candidates(row, capability), num_sms)))
    write(output, tuned, gpu_name)
    print(f"wrote {output}")
    return 0


def tune_row(
    row: DecodeVariant, cases: Sequence[DecodeCase], launches: Sequence[SplitLaunch], num_sms: int
) -> SplitLaunch:
    """Print what each launch takes and return the best; the first of ``launches`` is the present one."""
    best, best_ratio = launches[0], 1.0
    present_us = [case.time(best, num_sms) for case in cases]
    print(f"# {row.name}: {_format(best)} {_format_times(present_us)}, the present one")
    for launch in launches[1:]:
        try:
            times_us = [case.time(launch, num_sms) for case in cases]
        except (ArithmeticError, OutOfResources, RuntimeError) as error:
            print(f"# {row.name}: {_format(launch)} failed: {error}")
            continue
        ratio = geometric_mean(now / before for now, before in zip(times_us, present_us, strict=True))
        print(f"# {row.name}: {_format(launch)} {_format_times(times_us)}, {ratio:.3f} of the present time")
        if ratio < min(best_ratio, 1 - MIN_GAIN):
            best, best_ratio = launch, ratio
    print(f"{row.name}: {_format(best)}, {best_ratio:.3f} of the present time", flush=True)
    return best


def compile_all(rows: Sequence[DecodeVariant], capability: tuple[int, int], num_jobs: int) -> None:
    """Let processes fill Triton's cache on disk; what does not compile is noticed when it is timed."""
    if num_jobs < 2:
        return
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_launch, row, launch) for row in rows for launch in candidates(row, capability)]
        for job in jobs:
            job.exception()


def compile_launch(row: DecodeVariant, launch: SplitLaunch) -> None:
    """Compile by running the smallest step, in which one program has all the work."""
    DecodeCase(row, SMALLEST, DEVICE).run(launch, num_programs=1)


def write(path: Path, rows: Sequence[DecodeVariant], gpu_name: str) -> None:
    """Write the launches of ``rows``, and those that the file has of others."""
    launches = read_launches(path) if path.exists() else {}
    launches |= {row.name: asdict(row.launch) for row in rows if row.launch is not None}
    path.write_text(format_launches(launches, f"Measured on: {gpu_name}."), encoding="utf-8")


def _format(launch: SplitLaunch) -> str:
    return f"SplitLaunch({', '.join(map(str, astuple(launch)))})"


def _format_times(times_us: Sequence[float]) -> str:
    return " ".join(f"{time_us:.1f}" for time_us in times_us) + " us"


if __name__ == "__main__":
    sys.exit(main())
