"""Grammars compiled off the event loop, before their requests are accepted."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from aserve.errors import CapacityError
from aserve.request import GrammarSpec
from aserve.structured.compile import GrammarCompiler

MAX_PENDING = 64


class GrammarQueue:
    """One thread that compiles what is not at hand, in the order of arrival."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._num_pending = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aserve-grammar")

    async def compile(self, spec: GrammarSpec) -> None:
        """Return once ``spec`` is at hand.

        Raises ClientError if it cannot be used, CapacityError if too many others wait.
        """
        if self._compiler.find(spec) is not None:
            return
        if self._num_pending >= MAX_PENDING:
            raise CapacityError(f"{self._num_pending} grammars are waiting to be compiled already")
        self._num_pending += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._compiler.compile, spec)
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        """Drop what waits and release what the compiler holds. Blocks for the one in progress."""
        self._thread.shutdown(wait=True, cancel_futures=True)
