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
from pathlib import Path

import torch

from aserve.distributed.channel import Channel
from aserve.distributed.context_shard import ContextShard
from aserve.distributed.group import RankGroup
from aserve.distributed.messages import Failed, Ready, Setup, Started, decode_order, encode
from aserve.errors import AserveError, EngineDeadError
from aserve.log import configure_logging
from aserve.runner.build import build_runner
from aserve.runner.ranks.follower import Follower, describe
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
    if compiler is not None:
        compiler.load_vocabulary()  # the first grammar would hold up every stream for it
    gc.freeze()  # a collection that visits all that was loaded would hold up every rank
    Follower(channel, runner, compiler).follow()
    runner.close()
    group.close()


if __name__ == "__main__":
    main()
