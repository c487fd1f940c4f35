"""Another rank as rank 0 sees it: a process and the channel to it."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import aserve
from aserve.distributed.channel import Channel
from aserve.distributed.messages import Report, decode_report

EXIT_S = 1.0  # between a process's last breath and its exit status


class RankProcess:
    """Ends with this process, whatever happens to it: the other end of the channel notices."""

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        self.rank = rank
        self._process = process
        self._channel = channel

    @classmethod
    def start(cls, rank: int, module: str, environment: dict[str, str]) -> Self:
        """Run ``module`` with the number of its end's file as argument; ``environment`` is added to this process's."""
        ours, theirs = socket.socketpair()
        paths = (str(Path(aserve.__file__).parent.parent), os.environ.get("PYTHONPATH"))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
        with theirs:  # a copy stays open in the process
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        return cls(rank, process, Channel(ours))

    def send(self, order: bytes) -> None:
        """Give an encoded order. Raises OSError if the process is gone or does not listen."""
        self._channel.send(order)

    def receive(self) -> Report | None:
        """Wait for what the process says next; None once it has ended."""
        message = self._channel.receive()
        return None if message is None else decode_report(message)

    def exit_status(self, timeout_s: float = EXIT_S) -> int | None:
        """Return the exit status, negative for a signal; None if the process still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End the process now. Idempotent."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the channel to a process that has ended. Idempotent."""
        self._channel.close()
