"""Node, its packages and Chromium for tests: found or installed, else a failure in CI and a named skip elsewhere."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from aserve.config import cache_folder

E2E = Path(__file__).parent / "e2e"
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL_TIMEOUT_S = 300


def give_up(reason: str) -> NoReturn:
    """Fail in CI, skip elsewhere; a module that asks at its top is one line in the summary."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def find_node() -> str:
    """Return the path of Node."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        give_up("Node and npm are not installed")
    return node


def find_chromium() -> str:
    """Return the path of Chromium or Chrome."""
    for name in CHROMIUM_NAMES:
        if path := shutil.which(name):
            return path
    give_up("Chromium is not installed")


def install_packages() -> Path:
    """Return a ``node_modules`` with what package.json names, installed once into the cache folder."""
    find_node()
    manifest = (E2E / "package.json").read_bytes()
    folder = cache_folder() / "node" / hashlib.sha256(manifest).hexdigest()[:16]
    marker = folder / ".installed"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of the same test run ask at the same time
        if not marker.exists():
            (folder / "package.json").write_bytes(manifest)
            install(folder)
            marker.touch()
    return folder / "node_modules"


def install(folder: Path) -> None:
    """Let npm install what the package.json in ``folder`` names."""
    command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=INSTALL_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        output = (error.stderr or b"").decode(errors="replace")[-500:]
        give_up(f"the Node packages could not be installed: {output}")


def node_environment() -> dict[str, str]:
    """Return the environment in which Node finds the packages."""
    return {**os.environ, "NODE_PATH": str(install_packages())}
