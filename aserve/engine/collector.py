"""The sink behind ``AsyncEngine.generate``: one slot that merges what its reader has not taken yet."""

import asyncio

from aserve.errors import AserveError
from aserve.request import RequestOutput


class Collector:
    """Holds at most one output, however slow the reader is; wakes the reader only when it waits.

    Owned by one reader, who may want the whole output and nothing before. ``put`` and ``fail`` are called by the step
    loop on the same event loop.
    """

    def __init__(self, *, is_whole: bool = False) -> None:
        self._is_whole = is_whole
        self.is_finished = False  # nothing more will be put
        self._output: RequestOutput | None = None
        self._error: AserveError | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Take ``output``, appending it to what still waits here."""
        if self._output is None:
            self._output = output
        else:
            self._output.merge(output)
        self.is_finished = output.finish_reason is not None
        self._wake_reader()

    def fail(self, error: AserveError) -> None:
        """End the stream; the reader gets what was put before, then ``error``."""
        self._error = error
        self.is_finished = True
        self._wake_reader()

    async def get(self) -> RequestOutput:
        """Return everything that is new, waiting for it if need be; raise the error that ended the request."""
        while self._output is None or (self._is_whole and not self.is_finished):
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._is_whole and self._error is not None:
            raise self._error
        output, self._output = self._output, None
        return output

    def _wake_reader(self) -> None:
        if self._is_whole and not self.is_finished:
            return
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
