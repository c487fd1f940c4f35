"""Time from the start of the command to readiness, and peak resident memory, first and later starts.

    python -m aserve.bench.startup

A first start has an empty cache folder except for the downloaded model file: weights are packed and
kernels are compiled. Memory is the process's peak (VmHWM) with and without the KV pool, which is resident as a whole
from the start on. Medians of three starts of each kind.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from aserve.bench.report import format_table
from aserve.demo_model import find_demo_model


@dataclass(frozen=True, slots=True)
class Start:
    """One start; ``peak_mib`` counts everything, the KV pool included."""

    kind: str
    bound_s: float
    ready_s: float
    peak_mib: float
    kv_pool_mib: float
    peak_without_pool_mib: float


KINDS = ("first", "later")
FIGURES = [figure.name for figure in fields(Start) if figure.name != "kind"]


def main() -> None:
    """Measure a few first and later starts and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="starts of each kind (default: %(default)s)")
    parser.add_argument("--kv-memory-gib", type=float, default=1.0, help="GiB of KV pages (default: %(default)s)")
    arguments = parser.parse_args()
    model = find_demo_model().path
    starts = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as cache:
            (Path(cache) / model.name).symlink_to(model)
            starts += [measure_start(kind, cache, arguments.kv_memory_gib) for kind in KINDS]
    print(format_table([asdict(_median_of(kind, starts)) for kind in KINDS]))


def _median_of(kind: str, starts: list[Start]) -> Start:
    chosen = [start for start in starts if start.kind == kind]
    figures = {name: median(getattr(start, name) for start in chosen) for name in FIGURES}
    return Start(kind=kind, **figures)


def measure_start(kind: str, cache: str, kv_memory_gib: float) -> Start:
    """Start a server with ``cache`` as its cache folder, wait until it is ready, answer once, stop it."""
    port = _free_port()
    flags = ["--port", str(port), "--kv-memory-gib", str(kv_memory_gib), "--log-level", "warning"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "aserve", "serve", *flags],
        env=os.environ | {"ASERVE_CACHE": cache},
        stdout=subprocess.DEVNULL,
    )
    try:
        bound_s = _wait_for(f"http://127.0.0.1:{port}/health", process) - begin
        ready_s = _wait_for(f"http://127.0.0.1:{port}/ready", process) - begin
        _complete(port)
        peak_mib, pool_mib = _peak_mib(process.pid), 1024 * kv_memory_gib
        return Start(kind, bound_s, ready_s, peak_mib, pool_mib, peak_mib - pool_mib)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: str, process: "subprocess.Popen[bytes]") -> float:
    """Poll until the answer is 200 and return the time."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return time.perf_counter()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.02)
    raise SystemExit(f"the server ended with exit code {process.returncode}")


def _complete(port: int) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        b'{"prompt": "The sky is", "max_tokens": 16}',
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


if __name__ == "__main__":
    main()
