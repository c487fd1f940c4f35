"""What a rank above 0 does from the moment it is ready: it follows rank 0's orders and reports what they led to."""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from aserve.distributed.channel import Channel
from aserve.distributed.messages import (
    Close,
    Execute,
    Executed,
    Failed,
    Prepared,
    PrepareGrammar,
    Report,
    WarmUp,
    decode_order,
    encode,
)
from aserve.distributed.step_digest import StepDigest
from aserve.errors import AserveError, EngineDeadError
from aserve.request import GrammarSpec
from aserve.runner.base import ModelRunner
from aserve.scheduler.plan import StepPlan, StepTokens
from aserve.structured.compile import GrammarCompiler


class Follower:
    """Launches on ``runner`` in the order of orders; its own thread compiles grammars beside that."""

    def __init__(self, channel: Channel, runner: ModelRunner, compiler: GrammarCompiler | None) -> None:
        self._channel = channel
        self._runner = runner
        self._compiler = compiler
        self._digest = StepDigest()

    def follow(self) -> None:
        """Follow orders until the one to close; raises EngineDeadError if rank 0 is gone before."""
        with ThreadPoolExecutor(1, thread_name_prefix="aserve-grammar") as grammars:
            while (message := self._channel.receive()) is not None:
                match decode_order(message):
                    case Execute(plan):
                        self._runner.launch(plan).add_done_callback(partial(self._report_step, plan))
                    case PrepareGrammar(grammar):
                        grammars.submit(self._prepare, grammar)
                    case WarmUp():
                        self._runner.warm_up()
                    case Close():
                        return
        raise EngineDeadError("rank 0 is gone")

    def _report_step(self, plan: StepPlan, done: "Future[StepTokens]") -> None:
        """Called on the runner's thread, in the order of steps."""
        error = done.exception()
        self._report(Failed(describe(error)) if error else Executed(self._digest.advance(plan, done.result())))

    def _prepare(self, grammar: GrammarSpec) -> None:
        """Compile ``grammar``; what is wrong with it rank 0 finds as well, and tells the client."""
        if self._compiler is not None:
            with contextlib.suppress(AserveError):
                self._compiler.compile(grammar)
        self._report(Prepared())

    def _report(self, report: Report) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone, as ``follow`` notices
            self._channel.send(encode(report))


def describe(error: BaseException) -> str:
    """Return the error's text, with its type unless it was raised on purpose."""
    return str(error) if isinstance(error, AserveError) else f"{type(error).__name__}: {error}"
