"""The process of a rank above 0: it executes what rank 0 plans, and ends when rank 0 does.

``python -m aserve.runner.ranks.worker FD``, where FD is its end of the channel.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from aserve.distributed.channel import Channel
from aserve.distributed.context_shard import ContextShard
from aserve.distributed.group import RankGroup
from aserve.distributed.messages import (
    Close,
    Execute,
    Executed,
    Failed,
    Ready,
    Setup,
    Started,
    WarmUp,
    decode_order,
    encode,
)
from aserve.distributed.step_digest import StepDigest
from aserve.errors import AserveError, EngineDeadError
from aserve.log import configure_logging
from aserve.runner.base import ModelRunner
from aserve.runner.build import build_runner
from aserve.scheduler.plan import StepPlan, StepTokens
from aserve.structured.compile import GrammarCompiler
from aserve.tokenizer.load import load_tokenizer

logger = logging.getLogger(__name__)

PARENT_POLL_S = 1.0


def main() -> None:
    """Run to the end, but not the interpreter's: that takes seconds, and a thread may wait for a rank that is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides, though a terminal or an init tells all
        signal.signal(number, signal.SIG_IGN)
    configure_logging("warning")
    threading.Thread(target=end_with, args=(os.getppid(),), name="aserve-parent", daemon=True).start()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    status = 1
    try:
        _run(channel)
        status = 0
    except EngineDeadError:
        pass
    except BaseException as error:
        if not isinstance(error, AserveError):
            logger.exception("a rank has failed")
        with contextlib.suppress(OSError):
            channel.send(encode(Failed(describe(error))))
    logging.shutdown()
    os._exit(status)


def end_with(parent_id: int) -> None:
    """End this process soon after its parent, whatever it waits for."""
    while os.getppid() == parent_id:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def _run(channel: Channel) -> None:
    message = channel.receive()
    if message is None:
        raise EngineDeadError("rank 0 is gone")
    setup = decode_order(message)
    if not isinstance(setup, Setup):
        raise ValueError(f"the first order must be a Setup, not {setup}")
    compiler = GrammarCompiler(load_tokenizer(setup.files)) if setup.has_grammars else None
    group = RankGroup(ContextShard(setup.rank, setup.size), torch.device(setup.config.device))
    channel.send(encode(Started()))
    group.join(Path(setup.store))
    runner = build_runner(setup.config, setup.files, frozenset(setup.eos_token_ids), compiler, group)
    channel.send(encode(Ready(runner.limits)))
    gc.freeze()  # a collection that visits all that was loaded would hold up every rank
    follow(channel, runner)
    runner.close()
    group.close()


def follow(channel: Channel, runner: ModelRunner) -> None:
    """Do what rank 0 says until it says Close; raises EngineDeadError if it is gone before."""
    digest = StepDigest()
    while (message := channel.receive()) is not None:
        match decode_order(message):
            case Execute(plan):
                runner.launch(plan).add_done_callback(partial(_report, channel, digest, plan))
            case WarmUp():
                runner.warm_up()
            case Close():
                return
    raise EngineDeadError("rank 0 is gone")


def _report(channel: Channel, digest: StepDigest, plan: StepPlan, done: "Future[StepTokens]") -> None:
    error = done.exception()
    report = Failed(describe(error)) if error else Executed(digest.advance(plan, done.result()))
    with contextlib.suppress(OSError):  # rank 0 is gone, as ``follow`` notices
        channel.send(encode(report))


def describe(error: BaseException) -> str:
    """Return the error's text, with its type unless it was raised on purpose."""
    return str(error) if isinstance(error, AserveError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
