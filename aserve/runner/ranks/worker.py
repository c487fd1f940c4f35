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
    parent_id = os.getppid()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    status = 1
    try:
        _run(channel, parent_id)
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


def end_with(parent_id: int, store: Path) -> None:
    """End this process soon after its parent, whatever it waits for; the ``store`` of the group goes with it."""
    while os.getppid() == parent_id:
        time.sleep(PARENT_POLL_S)
    _remove(store)
    os._exit(1)


def _run(channel: Channel, parent_id: int) -> None:
    """Do what rank 0 says from its first order on; if that ends in any other way than its last, rank 0 may be gone."""
    message = channel.receive()
    if message is None:
        raise EngineDeadError("rank 0 is gone")
    setup = decode_order(message)
    if not isinstance(setup, Setup):
        raise ValueError(f"the first order must be a Setup, not {setup}")
    store = Path(setup.store)
    threading.Thread(target=end_with, args=(parent_id, store), name="aserve-parent", daemon=True).start()
    try:
        _serve(channel, setup)
    except BaseException:
        _remove(store)
        raise


def _serve(channel: Channel, setup: Setup) -> None:
    """Join the group, load, and follow orders to the last."""
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


def _remove(store: Path) -> None:
    """Remove the file where the group met and its folder, as rank 0 does if it can."""
    with contextlib.suppress(OSError):
        store.unlink(missing_ok=True)
        store.parent.rmdir()


if __name__ == "__main__":
    main()
