"""Compilation for a Hopper GPU on a machine without one: a script that makes launches compilations, and its reports."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget

TESTS = Path(__file__).resolve().parent


class HopperDriver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_by(script: Path, cache: Path) -> list[Any]:
    """Run ``script``, which must have a process where Triton does not interpret; return the JSON lines it prints."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
