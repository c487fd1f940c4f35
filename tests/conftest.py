"""Fixtures shared by all tests, and the table at the end of the GPU's run."""

import os
from collections import Counter, defaultdict

import pytest
import torch

from aserve.model_files import ModelFiles

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; Triton reads this where they are defined


@pytest.fixture(scope="session")
def demo_files() -> ModelFiles:
    """The embedded demo model, taken from the cache folder or by pip."""
    from aserve.demo_model import find_demo_model

    return find_demo_model()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With ``-m gpu``, print what passed, what failed and how long it took, file by file."""
    if config.option.markexpr != "gpu":
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
