"""The one thread that a device's work runs on, from calibration to the last step."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs what is submitted in order, with ``num_threads`` threads inside each torch operator."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="aserve-compute", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Enqueue a call and return at once."""
        return self._pool.submit(function, *args, **kwargs)

    def close(self) -> None:
        """Wait for what was submitted. Idempotent."""
        self._pool.shutdown(wait=True)
