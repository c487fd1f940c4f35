"""All kernel tests once more under the address and undefined-behaviour sanitizers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aserve.kernels.cpu.library import find_compiler

FOLDER = Path(__file__).parent
TESTS = ("test_int8_linear.py", "test_cpu_operators.py", "test_cpu_attention.py")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_kernels_break_no_rule_of_c() -> None:
    """torch's memory is malloc's, so a read past a tensor's end is found too."""
    command = [*find_compiler().command, "-print-file-name=libasan.so"]
    runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "KERNEL_FLAGS": FLAGS,
    }
    tests = [str(FOLDER / name) for name in TESTS]
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "1500", *tests]
    done = subprocess.run(pytest_command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
