"""``aserve serve``: run the server until a signal or a failure ends it."""

import argparse

from aserve.config import Config
from aserve.server.serve import run_server


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Serve; returns the exit code."""
    return run_server(config)
