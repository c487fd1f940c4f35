"""Compiles the C kernels for this machine at first use and loads them; knows no tensors.

The shared library goes to the cache folder under a name made from all that it depends on, so a changed source,
compiler or CPU gets its own. Where it cannot be built ``refusal`` says why, and callers use torch instead.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aserve.config import cache_folder
from aserve.errors import ConfigError

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = ("attention_block.c", "int8_linear.c", "operators.c", "attention.c", "pool.c")  # the slowest to compile first
HEADERS = ("attention.h", "pool.h", "simd.h")
COMPILERS = ("cc", "gcc", "clang")
COMMON_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread")
NATIVE_FLAGS = {"x86_64": "-march=native", "amd64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
COMPILE_TIMEOUT_S = 120.0
BUILDING = threading.Lock()  # who waits for it finds the library built


class KernelError(ConfigError):
    """The kernels cannot be built or loaded on this machine."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler that exists: its command line so far, and its version line."""

    command: tuple[str, ...]
    version: str


@cache
def load_kernels() -> ctypes.CDLL:
    """Return the library for this machine, built if need be. Raises KernelError, each time anew."""
    if not native_flags():
        raise KernelError(f"no C kernels for {platform.machine() or 'this'} processors")
    library = ctypes.CDLL(str(build(native_flags())))
    if platform.machine().lower() in ("x86_64", "amd64") and variant(library) == "portable":
        raise KernelError("this CPU lacks AVX2, and torch is faster than plain C")
    return library


@cache
def refusal() -> str | None:
    """Say why the kernels cannot be used here (logged once), None if they can."""
    try:
        log.info("C kernels: %s", variant(load_kernels()))
    except (KernelError, OSError) as error:
        log.warning("C kernels cannot be used, torch is used instead: %s", error)
        return str(error)
    return None


def variant(library: ctypes.CDLL) -> str:
    """Return what ``library`` was compiled to: "avx512-vnni", "avx2-vnni", "avx2" or "portable"."""
    library.kernel_variant.restype = ctypes.c_char_p
    name: bytes = library.kernel_variant()
    return name.decode()


def native_flags() -> tuple[str, ...]:
    """Return the flags that target this very CPU; none if it is of a kind that was never tried."""
    flag = NATIVE_FLAGS.get(platform.machine().lower())
    return () if flag is None or os.name != "posix" else (flag,)


def build(flags: Sequence[str]) -> Path:
    """Return the library compiled with ``flags`` besides the common ones. Raises KernelError with the reason."""
    compiler = find_compiler()
    all_flags = (*COMMON_FLAGS, *flags)
    path = cache_folder() / "kernels" / f"{_fingerprint(compiler, all_flags)}.so"
    with BUILDING:
        if not path.exists():
            started_at_s = time.perf_counter()
            _compile(compiler, all_flags, path)
            log.info("compiled the C kernels in %.1f s: %s", time.perf_counter() - started_at_s, path)
    return path


def build_ahead() -> threading.Thread:
    """Compile in the background what ``load_kernels`` will ask for, while the caller imports torch, say.

    A failure is not reported here: ``load_kernels`` meets it again.
    """

    def build_quietly() -> None:
        with contextlib.suppress(KernelError):
            if native_flags():
                build(native_flags())

    thread = threading.Thread(target=build_quietly, name="aserve-compile", daemon=True)
    thread.start()
    return thread


def find_compiler() -> Compiler:
    """Return the compiler in $CC, else the first of the usual names that exists."""
    setting = os.environ.get("CC")
    candidates = [tuple(shlex.split(setting))] if setting else [(name,) for name in COMPILERS]
    for command in candidates:
        if command and shutil.which(command[0]):
            return Compiler(command, _run([*command, "--version"]).partition("\n")[0])
    raise KernelError(f"no C compiler: {setting or ', '.join(COMPILERS)} not found")


def _fingerprint(compiler: Compiler, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (*compiler.command, compiler.version, *flags, cpu_features()):
        digest.update(part.encode() + b"\0")
    for name in (*SOURCES, *HEADERS):
        digest.update((FOLDER / name).read_bytes())
    return digest.hexdigest()[:32]


def cpu_features() -> str:
    """Return what "native" depends on: the instruction sets that Linux lists, or else the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: Compiler, flags: Sequence[str], path: Path) -> None:
    """Compile all sources side by side, link, and move the result into place in one step.

    Whoever compiles at the same time writes the same bytes under the same name.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            objects = [str(Path(folder) / f"{name}.o") for name in SOURCES]
            commands = [
                [*compiler.command, *flags, "-c", str(FOLDER / name), "-o", target]
                for name, target in zip(SOURCES, objects, strict=True)
            ]
            _run_together(commands)
            linked = Path(folder) / "kernels.so"
            _run([*compiler.command, *flags, "-shared", *objects, "-o", str(linked), "-lm"])
            linked.replace(path)
    except OSError as error:
        raise KernelError(f"cannot write the C kernels to {path.parent}: {error}") from error


def _run_together(commands: list[list[str]]) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
    deadline_s = time.monotonic() + COMPILE_TIMEOUT_S
    try:
        outputs = [process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"{commands[0][0]} took longer than {COMPILE_TIMEOUT_S:.0f} s") from error
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, command, output in zip(processes, commands, outputs, strict=True):
        _check(process.returncode, command, output)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMPILE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{command[0]} cannot be run: {error}") from error
    _check(done.returncode, command, done.stdout)
    return done.stdout


def _check(returncode: int, command: list[str], output: str) -> None:
    if returncode:
        message = output.strip().splitlines()
        raise KernelError(f"{command[0]} failed with status {returncode}: {message[0] if message else 'no output'}")
