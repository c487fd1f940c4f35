"""Compilation for a Hopper GPU on a machine without one: a script that makes launches compilations, and its reports."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TESTS = Path(__file__).resolve().parent
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class HopperDriver:
    """What Triton asks of a driver before it compiles; for another GPU than Hopper with its ``capability``."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self._architecture = 10 * capability[0] + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def read_resources(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread and the bytes that did not fit in them."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    sizes = {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": sizes["reg"], "spilled_bytes": sizes["stack"] + sizes["local"]}


def compile_by(script: Path, cache: Path, *arguments: str) -> list[Any]:
    """Run ``script``, which must have a process where Triton does not interpret; return the JSON lines it prints."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
