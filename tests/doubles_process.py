"""A serving process of its own for tests: started on a free port, watched from outside, always ended."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from doubles_port import reserve_port

TESTS = Path(__file__).parent


class ServingProcess:
    """One process. Its log is complete once it has exited."""

    def __init__(self, command: Sequence[str], log: Path, is_watched: bool) -> None:
        self._reserved = reserve_port()
        self.port = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
        if is_watched:
            environment["PYTHONDEVMODE"] = "1"
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [part.format(port=self.port) for part in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def status(self, path: str) -> int | None:
        """Return the status of a GET, None if nobody listens."""
        try:
            return httpx.get(self.url + path, timeout=5, verify=False).status_code
        except httpx.TransportError:
            return None

    def wait_for(self, path: str, status: int, timeout_s: float = 30.0) -> None:
        """Ask every 50 ms until the answer has that status."""
        deadline = time.monotonic() + timeout_s
        while (seen := self.status(path)) != status:
            assert time.monotonic() < deadline, f"{path} is {seen}, not {status}\n{self.log}"
            assert self.process.poll() is None, self.log
            time.sleep(0.05)

    def wait_for_start(self, count: int, timeout_s: float = 10.0) -> None:
        """Wait until so many requests have got their first token."""
        deadline = time.monotonic() + timeout_s
        started = re.compile(rf"^aserve_time_to_first_token_seconds_count\{{.*}} {float(count)}$", re.MULTILINE)
        while not started.search(httpx.get(self.url + "/metrics", timeout=5, verify=False).text):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Give its port back, once it has ended."""
        self._reserved.close()

    def check_log(self) -> None:
        """Nothing was lost or left behind."""
        for word in (
            "Traceback",
            "was destroyed",
            "never retrieved",
            "never awaited",
            "ResourceWarning",
            "Exception in",
        ):
            assert word not in self.log, self.log


@contextmanager
def serving(command: Sequence[str], log: Path, *, is_watched: bool = True) -> Iterator[ServingProcess]:
    """Run ``command``, in which ``{port}`` becomes a free port; end it whatever happens.

    ``is_watched`` lets Python log what is left unclosed or not awaited, which makes it slow.
    """
    server = ServingProcess(command, log, is_watched)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.close()


def scripted(*settings: str) -> list[str]:
    """Return the command of a serving process on a scripted engine."""
    return [sys.executable, str(TESTS / "serve_scripted.py"), "{port}", *settings]
