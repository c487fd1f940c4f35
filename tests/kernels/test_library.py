"""Building and loading the C kernels: the cache, concurrent starts, and every way in which it is refused."""

import ctypes
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from doubles_attention import make_problem
from doubles_kernels import variants

from aserve.attention.registry import resolve_backend
from aserve.config import EngineConfig
from aserve.engine import parts
from aserve.errors import ConfigError
from aserve.kernels.choose import choose_operators
from aserve.kernels.cpu import library
from aserve.kernels.cpu.library import KernelError, build, find_compiler, native_flags, refusal, variant
from aserve.kernels.cpu_operators import CpuOperators

REFUSED = """
import logging, torch
logging.basicConfig(level="INFO", format="%(message)s")
from aserve.kernels.choose import choose_operators
from aserve.kernels.cpu.library import refusal
from aserve.quantization.registry import resolve_quantization
cpu = torch.device("cpu")
print(refusal())
print(type(choose_operators(cpu)).__name__, resolve_quantization("int8", cpu).name)
"""


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def test_this_machine_is_not_refused() -> None:
    assert refusal() is None
    assert isinstance(choose_operators(torch.device("cpu")), CpuOperators)


@pytest.mark.parametrize("name", variants())
def test_each_variant_says_what_it_is(name: str) -> None:
    built = variant(ctypes.CDLL(str(build(variants()[name]))))
    assert built == name if name != "native" else built != "portable"


def test_a_library_is_compiled_once_whoever_comes_first(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SOURCES", ("pool.c",))
    with ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(lambda _: build(["-O0"]), range(4)))
    assert len(paths) == 1
    (path,) = paths
    assert [entry.name for entry in empty_cache.iterdir()] == [path.name]
    modified_at = path.stat().st_mtime_ns
    assert build(["-O0"]) == path
    assert path.stat().st_mtime_ns == modified_at
    assert ctypes.CDLL(str(path)).pool_create is not None


def test_what_is_built_ahead_is_not_built_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_compiling, may_finish = threading.Event(), threading.Event()
    compiled: list[Path] = []

    def compile_slowly(compiler: object, flags: object, path: Path) -> None:
        compiled.append(path)
        is_compiling.set()
        assert may_finish.wait(10)
        path.parent.mkdir(parents=True)
        path.touch()

    monkeypatch.setattr(library, "_compile", compile_slowly)
    thread = library.build_ahead()
    assert is_compiling.wait(10)
    threading.Timer(0.1, may_finish.set).start()
    path = build(native_flags())
    thread.join(10)
    assert compiled == [path]


def test_a_failure_ahead_is_met_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    library.build_ahead().join(10)
    with pytest.raises(KernelError, match="/bin/false failed"):
        build(native_flags())
    assert not empty_cache.exists()


def test_an_engine_compiles_while_it_locates_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(parts, "build_ahead", lambda: started.append(None))
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError):
            parts.load_parts(EngineConfig(model="/no/such/model", device=device), None, None)  # type: ignore[arg-type]
        assert len(started) == 1


def test_other_flags_or_another_cpu_get_another_library(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SOURCES", ("pool.c",))
    first = build(["-O0"])
    assert build(["-O1"]) != first
    monkeypatch.setattr(library, "cpu_features", lambda: "flags: another one")
    assert build(["-O0"]) != first
    assert len(list(empty_cache.iterdir())) == 3


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/bin/false", "/bin/false failed with status 1"), ("no-such-cc -O2", "no C compiler: no-such-cc -O2 not found")],
)
def test_without_a_working_compiler_torch_serves(tmp_path: Path, compiler: str, reason: str) -> None:
    environment = {"CC": compiler, "ASERVE_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REFUSED], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(reason)
    assert done.stdout.splitlines()[1] == "Operators int8_torch"
    assert done.stderr.count("C kernels cannot be used, torch is used instead: " + reason) == 1


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (*library.SOURCES, *library.HEADERS):
        (tmp_path / name).write_text("int broken(void) { return }\n" if name == "pool.c" else "\n")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    with pytest.raises(KernelError, match=r"failed with status 1: .*pool\.c"):
        build([])
    assert list(empty_cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(KernelError, match="cannot write the C kernels"):
        build([])


def test_unknown_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert native_flags() == ()
    with pytest.raises(KernelError, match="no C kernels for riscv64 processors"):
        library.load_kernels.__wrapped__()


def test_an_old_x86_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(library, "native_flags", lambda: variants()["portable"])
    with pytest.raises(KernelError, match="lacks AVX2"):
        library.load_kernels.__wrapped__()


def test_cc_may_carry_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc -DX=1")
    assert find_compiler().command == ("gcc", "-DX=1")


def test_the_reason_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> ctypes.CDLL:
        raise KernelError("because")

    monkeypatch.setattr(library, "load_kernels", refuse)
    refusal.cache_clear()
    with caplog.at_level(logging.INFO):
        assert [refusal(), refusal()] == ["because"] * 2
    refusal.cache_clear()
    assert [record.message for record in caplog.records] == ["C kernels cannot be used, torch is used instead: because"]


def test_the_registries_take_the_kernels_first() -> None:
    from aserve.quantization.registry import resolve_quantization

    cpu = torch.device("cpu")
    assert resolve_quantization("int8", cpu).name == "int8_cpu"
    assert resolve_backend("auto", make_problem(), cpu).name == "cpu"
