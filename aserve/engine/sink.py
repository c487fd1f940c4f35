"""Where the outputs of one request go: called straight from commit, on the loop, without a task or a queue."""

from typing import Protocol

from aserve.errors import AserveError
from aserve.request import RequestOutput


class Sink(Protocol):
    """Receives what is new for one request, in order, on the event loop's thread; must never block or raise.

    After an output with ``finish_reason``, or after ``fail``, nothing follows.
    """

    def put(self, output: RequestOutput) -> None:
        """Take ``output``; the sink owns it from here on."""

    def fail(self, error: AserveError) -> None:
        """Learn that the request ended without a final output."""
