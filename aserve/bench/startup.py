"""Time from the start of the command to readiness, and peak resident memory, first and later starts.

    python -m aserve.bench.startup

A first start has an empty cache folder except for the downloaded model file: weights are packed and
kernels are compiled. Memory is the process's peak (VmHWM) with and without the KV pool that it allocated.
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
from dataclasses import asdict, dataclass
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


def main() -> None:
    """Measure a few first and later starts and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="starts of each kind (default: 3)")
    arguments = parser.parse_args()
    model = find_demo_model().path
    starts = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as cache:
            (Path(cache) / model.name).symlink_to(model)
            starts += [measure_start("first", cache), measure_start("later", cache)]
    print(format_table([asdict(_median_of(kind, starts)) for kind in ("first", "later")]))


def _median_of(kind: str, starts: list[Start]) -> Start:
    chosen = [start for start in starts if start.kind == kind]
    return Start(
        kind,
        median(start.bound_s for start in chosen),
        median(start.ready_s for start in chosen),
        median(start.peak_mib for start in chosen),
    )


def measure_start(kind: str, cache: str) -> Start:
    """Start a server with ``cache`` as its cache folder, wait until it is ready, answer once, stop it."""
    port = _free_port()
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "aserve", "serve", "--port", str(port), "--log-level", "warning"],
        env=os.environ | {"ASERVE_CACHE": cache},
        stdout=subprocess.DEVNULL,
    )
    try:
        bound_s = _wait_for(f"http://127.0.0.1:{port}/health", process) - begin
        ready_s = _wait_for(f"http://127.0.0.1:{port}/ready", process) - begin
        _complete(port)
        return Start(kind, bound_s, ready_s, _peak_mib(process.pid))
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
