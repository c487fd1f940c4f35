"""``aserve replay``: check that the scheduler makes the recorded decisions again."""

import argparse

from aserve.config import Config
from aserve.engine.replay import replay_file


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Replay; returns 1 at the first difference."""
    report = replay_file(arguments.file)
    print(report)
    return 0 if report.is_equal else 1
