"""``python -m aserve.kernels.cake.tune``: measures launches of the family's rows on the GPU here and writes its file.

Each row is tried on steps at both ends of what it serves; what counts is the mean of its times relative to those of the
present launch, which stays unless another is faster by more than 1.5 %. Rows that are not tried keep what the file has.
Launches are compiled by all cores first. On what is written, see tuned_launches.py.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Protocol

import torch
from triton.runtime.errors import OutOfResources

from aserve.kernels.cake import decode_candidates, prefill_candidates
from aserve.kernels.cake.decode_case import DecodeCase, StepSize
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, SEVERAL_VARIANTS, DecodeVariant
from aserve.kernels.cake.prefill_case import ChunkSize, PrefillCase
from aserve.kernels.cake.prefill_launch import PrefillLaunch
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS, PrefillVariant
from aserve.kernels.cake.select_variant import refuse_gpu
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.cake.tuned_launches import FOLDER, file_name, format_launches, read_launches, tune_rows
from aserve.kernels.cake.variant import Launch, Variant

DEVICE = torch.device("cuda")
MIN_GAIN = 0.015
SEVERAL = 4  # queries of a sequence that rows for several are measured by, as drafts of usual length have
SMALLEST_CHUNK = ChunkSize(1, 1)  # enough to compile for


class Case(Protocol):
    """A step to time launches by."""

    def time(self, launch: Any, num_sms: int) -> float:
        """Return the microseconds of one layer; raise ArithmeticError for a wrong result."""


class Tuning(Protocol):
    """A row, and how its launches are measured."""

    @property
    def row(self) -> Variant:
        """What is measured."""

    def candidates(self, capability: tuple[int, int]) -> Sequence[Any]:
        """Return launches for GPUs of ``capability``, the present one first."""

    def cases(self) -> Sequence[Case]:
        """Return the steps that decide."""

    def compile(self, launch: Any) -> None:
        """Compile by running a small step."""


@dataclass
class DecodeTuning:
    """Of a row of decodes, or of the last ``num_queries`` of each sequence."""

    row: DecodeVariant
    num_queries: int = 1

    def candidates(self, capability: tuple[int, int]) -> Sequence[SplitLaunch]:
        return decode_candidates.candidates(self.row, capability, self.num_queries)

    def cases(self) -> Sequence[DecodeCase]:
        sizes = decode_candidates.step_sizes(self.row, self.num_queries)
        return [DecodeCase(self.row, size, DEVICE) for size in sizes]

    def compile(self, launch: SplitLaunch) -> None:
        DecodeCase(self.row, StepSize(1, 16, self.num_queries), DEVICE).run(launch, num_programs=1)


@dataclass
class PrefillTuning:
    """Of a row of prompts."""

    row: PrefillVariant

    def candidates(self, capability: tuple[int, int]) -> Sequence[PrefillLaunch]:
        return prefill_candidates.candidates(self.row, capability)

    def cases(self) -> Sequence[PrefillCase]:
        return [PrefillCase(self.row, size, DEVICE) for size in prefill_candidates.SIZES]

    def compile(self, launch: PrefillLaunch) -> None:
        PrefillCase(self.row, SMALLEST_CHUNK, DEVICE).run(launch)


def main(argv: Sequence[str] | None = None) -> int:
    """Tune, print and write; returns 1 on a machine without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = (*DECODE_VARIANTS, *SEVERAL_VARIANTS, *PREFILL_VARIANTS)
    names = [row.name for row in rows if row.launch is not None]
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
    tunings = [
        tuning
        for tuning in tunings_of(gpu_name, capability)
        if tuning.row.name in arguments.rows and refuse_gpu(tuning.row, capability) is None
    ]
    compile_all(tunings, capability, arguments.jobs)
    tuned = {tuning.row.name: tune_row(tuning, tuning.candidates(capability), num_sms) for tuning in tunings}
    write(output, tuned, gpu_name)
    print(f"wrote {output}")
    return 0


def tunings_of(gpu_name: str, capability: tuple[int, int]) -> list[Tuning]:
    """Return those of all rows, which have the launches that a GPU has at present."""
    decodes = tune_rows(DECODE_VARIANTS, gpu_name, capability)
    several = tune_rows(SEVERAL_VARIANTS, gpu_name, capability)
    prompts = tune_rows(PREFILL_VARIANTS, gpu_name, capability)
    return [
        *(DecodeTuning(row) for row in decodes),
        *(DecodeTuning(row, SEVERAL) for row in several),
        *(PrefillTuning(row) for row in prompts),
    ]


def tune_row(tuning: Tuning, launches: Sequence[Any], num_sms: int) -> Launch:
    """Print what each launch takes and return the best; the first of ``launches`` is the present one."""
    row, cases = tuning.row, tuning.cases()
    best: Launch = launches[0]
    best_ratio = 1.0
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


def compile_all(tunings: Sequence[Tuning], capability: tuple[int, int], num_jobs: int) -> None:
    """Let processes fill Triton's cache on disk; what does not compile is noticed when it is timed."""
    if num_jobs < 2:
        return
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(tuning.compile, launch) for tuning in tunings for launch in tuning.candidates(capability)]
        for job in jobs:
            job.exception()


def write(path: Path, launches: Mapping[str, Launch], gpu_name: str) -> None:
    """Write ``launches`` by the names of their rows, and those that the file has of others."""
    tables = read_launches(path) if path.exists() else {}
    tables |= {name: asdict(launch) for name, launch in launches.items()}
    path.write_text(format_launches(tables, f"Measured on: {gpu_name}."), encoding="utf-8")


def _format(launch: Launch) -> str:
    return f"{type(launch).__name__}({', '.join(map(str, astuple(launch)))})"


def _format_times(times_us: Sequence[float]) -> str:
    return " ".join(f"{time_us:.1f}" for time_us in times_us) + " us"


if __name__ == "__main__":
    sys.exit(main())
