"""Grammars compiled off the event loop, before their requests are accepted."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from aserve.errors import CapacityError, ClientError
from aserve.request import GrammarSpec
from aserve.runner.base import ModelRunner
from aserve.structured.compile import GrammarCompiler
from aserve.structured.trial import GrammarTrial

MAX_PENDING = 64


class GrammarQueue:
    """One thread that compiles what is not at hand, in the order of arrival; what clients wrote is tried first."""

    def __init__(self, compiler: GrammarCompiler, runner: ModelRunner) -> None:
        """``runner`` may have ranks that compile for themselves."""
        self._compiler = compiler
        self._runner = runner
        self._trial: GrammarTrial | None = None  # made when first needed
        self._num_pending = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aserve-grammar")

    async def compile(self, spec: GrammarSpec) -> None:
        """Return once ``spec`` is at hand.

        Raises ClientError if it cannot be used, CapacityError if too many others wait, EngineDeadError if a rank that
        compiles it, too, is lost.
        """
        if self._compiler.find(spec) is not None:
            return
        if self._num_pending >= MAX_PENDING:
            raise CapacityError(f"{self._num_pending} grammars are waiting to be compiled already")
        self._num_pending += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._try_and_compile, spec)
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        """Drop what waits and what is in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._trial is not None:
            self._trial.close()
        self._thread.shutdown(wait=True)

    def _try_and_compile(self, spec: GrammarSpec) -> None:
        if self._compiler.find(spec) is not None:  # by a job before
            return
        if spec.kind != "json_object":
            self._trial = self._trial or GrammarTrial(self._compiler.token_bytes())
            try:
                self._trial.check(spec)
            except ClientError as error:
                self._compiler.refuse(spec, error)
                raise
        self._runner.prepare_grammar(spec)
        self._compiler.compile(spec)
