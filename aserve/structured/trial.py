"""Compiles what clients send in a process that may hang, crash or run out of memory, before this one does it.

A thread could be given up on but not stopped, and a grammar can exhaust a stack. The process is started when first
needed and again after each time that it ended; it limits itself (``trial_process.py``), so that nothing is left
running if this one is killed.
"""

import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, NoReturn

import orjson

import aserve
from aserve.errors import CapacityError, ClientError
from aserve.request import GrammarSpec
from aserve.structured.vocabulary import TokenBytes

COMMAND = (sys.executable, "-m", "aserve.structured.trial_process")
LENGTH = struct.Struct("<I")
TIME_SIGNALS = (signal.SIGPROF, signal.SIGALRM)


class GrammarTrial:
    """One process, one grammar at a time; calls from several threads take turns."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def check(self, spec: GrammarSpec) -> None:
        """Raise ClientError unless ``spec`` compiles within the limits. Blocks until that is known."""
        with self._lock:
            try:
                process = self._running()
                send(process.stdin, orjson.dumps([spec.kind, spec.text]))
                answer = receive(process.stdout)
            except OSError:  # a broken pipe: it ended while it was idle or while it loaded
                answer = None
            if answer is None:
                self._raise_end()
            message, is_foreseen = orjson.loads(answer)
            if not is_foreseen:  # nobody knows in what state that has left the process
                process.kill()
                self._end()
            if message is not None:
                raise ClientError(message, param="grammar")

    def close(self) -> None:
        """End the process, in the middle of a grammar too. Idempotent."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise CapacityError("the server is shutting down")
        if self._process is None or self._process.poll() is not None:
            self._end()
            path = os.pathsep.join(filter(None, (str(Path(aserve.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
            send(self._process.stdin, self._table.dump())
        return self._process

    def _raise_end(self) -> NoReturn:
        """Say why the process has ended."""
        code = self._end()
        if self._is_closed:
            raise CapacityError("the server is shutting down")
        if code is not None and -code in TIME_SIGNALS:
            raise ClientError("the grammar takes too long to compile", param="grammar", code="grammar_too_complex")
        if code is not None and code < 0:
            raise ClientError("the grammar is too complex to compile", param="grammar", code="grammar_too_complex")
        raise CapacityError(f"grammars cannot be compiled now: the process for it ended with code {code}")

    def _end(self) -> int | None:
        """Wait for the process, which must have ended or be about to, and forget it; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with process:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except OSError:  # what was buffered cannot be written any more
                    continue
        return process.returncode


def send(pipe: IO[bytes] | None, payload: bytes) -> None:
    """Write ``payload`` behind its length."""
    assert pipe is not None
    pipe.write(LENGTH.pack(len(payload)) + payload)
    pipe.flush()


def receive(pipe: IO[bytes] | None) -> bytes | None:
    """Read what ``send`` wrote; None if the other side has ended."""
    assert pipe is not None
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    payload = pipe.read(length)
    return payload if len(payload) == length else None
