"""The other side of ``trial.py``: reads grammars from stdin, compiles each within limits, answers on stdout.

The limits are the operating system's, since compiled code cannot be interrupted from Python: what exceeds one ends the
process.
"""

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import orjson
from llguidance import LLTokenizer

from aserve.errors import ClientError
from aserve.request import GrammarSpec
from aserve.structured.compile import CompiledGrammar, first_lines
from aserve.structured.trial import receive, send
from aserve.structured.vocabulary import TokenBytes, build_vocabulary

START_S = 60.0  # wall-clock time to load
COMPILE_CPU_S = 2.0
COMPILE_S = 15.0  # wall-clock time, on a machine that is busy with other things
MAX_MASK_S = 0.02  # CPU time, where most grammars need less than a millisecond for each token
MAX_GROWTH_BYTES = 512 << 20
STACK_BYTES = 1 << 20  # less than any thread of the server has
NICENESS = 10

Answer = tuple[str | None, bool]  # what is wrong, and whether that was foreseen


def main() -> None:
    """Serve until stdin ends."""
    os.nice(NICENESS)
    signal.setitimer(signal.ITIMER_REAL, START_S)
    table = receive(sys.stdin.buffer)
    if table is None:
        return
    vocabulary = build_vocabulary(TokenBytes.load(table))
    threading.stack_size(STACK_BYTES)
    _limit_memory()
    signal.setitimer(signal.ITIMER_REAL, 0)
    while (frame := receive(sys.stdin.buffer)) is not None:
        kind, text = orjson.loads(frame)
        send(sys.stdout.buffer, orjson.dumps(_try_within_limits(GrammarSpec(kind, text), vocabulary)))


def _try_within_limits(spec: GrammarSpec, vocabulary: LLTokenizer) -> Answer:
    """Try ``spec``; what exceeds the limits ends the process."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(_try(spec, vocabulary)))
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, COMPILE_S)
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return answers[0]


def _try(spec: GrammarSpec, vocabulary: LLTokenizer) -> Answer:
    try:
        return _find_fault(spec, vocabulary), True
    except BaseException as error:  # a panic of compiled code is no Exception
        return f"the {spec.kind} cannot be used: {first_lines(str(error)) or type(error).__name__}", False


def _find_fault(spec: GrammarSpec, vocabulary: LLTokenizer) -> str | None:
    try:
        compiled = CompiledGrammar(spec, vocabulary)
    except ClientError as error:
        return error.message
    matcher = compiled.start()
    started_s = time.thread_time()
    matcher.compute_bitmask()
    if time.thread_time() - started_s > MAX_MASK_S:
        return "the grammar takes too long to follow"
    return None


def _limit_memory() -> None:
    """Let the address space grow by what a grammar may take, where the system tells how large it is."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MAX_GROWTH_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
