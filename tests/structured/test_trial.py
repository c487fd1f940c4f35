"""B41: what would hang, crash or fill the memory ends in a process of its own, and the next grammar is fine."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import pytest
from doubles_http import demo_tokenizer
from doubles_structured import nested_choice

from aserve.errors import CapacityError, ClientError
from aserve.request import GrammarSpec
from aserve.structured.trial import GrammarTrial
from aserve.structured.vocabulary import TokenBytes

GOOD = GrammarSpec("regex", "[a-z]+")
CHAIN = "\n".join(["start: r0", *(f'r{i}: r{i + 1} "x"' for i in range(5000)), 'r5000: "a"'])


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial(TokenBytes.of(demo_tokenizer()))
    yield trial
    trial.close()


def test_a_good_grammar_passes_and_a_bad_one_says_why(trial: GrammarTrial) -> None:
    trial.check(GOOD)
    with pytest.raises(ClientError, match="unclosed character class"):
        trial.check(GrammarSpec("regex", "["))
    trial.check(GrammarSpec("json_schema", json.dumps({"enum": [f"word{i:06d}" for i in range(4500)]})))


def test_a_grammar_that_overflows_the_stack_is_refused(trial: GrammarTrial) -> None:
    with pytest.raises(ClientError, match="too complex") as caught:
        trial.check(GrammarSpec("lark", CHAIN))
    assert caught.value.code == "grammar_too_complex"
    trial.check(GOOD)


@pytest.mark.alone
@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", json.dumps(nested_choice(10))),
        GrammarSpec("json_schema", '{"type": "integer", "multipleOf": 1000000007}'),
        GrammarSpec("regex", "[a-z]?" * 9000 + "x"),
        GrammarSpec("lark", "start: " + '"a"?' * 10_000),
    ],
    ids=["oneOf", "multipleOf", "optional classes", "optional strings"],
)
def test_what_takes_long_is_refused_within_the_deadline(trial: GrammarTrial, spec: GrammarSpec) -> None:
    trial.check(GOOD)
    started_s = time.monotonic()
    with pytest.raises(ClientError):
        trial.check(spec)
    assert time.monotonic() - started_s < 15
    trial.check(GOOD)


def test_a_process_that_uses_up_its_time_is_ended_by_the_system(trial: GrammarTrial) -> None:
    trial.check(GOOD)
    assert trial._process is not None
    process = trial._process
    stop(process)  # it is in the middle of a grammar for as long as the test wants
    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(trial.check, GrammarSpec("regex", "b+"))
        try:
            while not unread_bytes(process.stdin):
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGPROF)
            os.kill(process.pid, signal.SIGCONT)
            with pytest.raises(ClientError, match="too long"):
                checking.result(20)
        finally:
            process.kill()
    trial.check(GOOD)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop ``process`` and wait until it stands: before, it could still read what comes."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def unread_bytes(pipe: IO[bytes] | None) -> int:
    """Return how many bytes of what was written into ``pipe`` nobody has read yet."""
    assert pipe is not None
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_process_that_has_ended_while_idle_is_replaced(trial: GrammarTrial) -> None:
    trial.check(GOOD)
    assert trial._process is not None
    trial._process.kill()
    trial._process.wait()
    trial.check(GOOD)


def test_what_nobody_has_foreseen_is_an_answer_and_the_next_grammar_gets_a_new_process(trial: GrammarTrial) -> None:
    trial.check(GOOD)
    assert trial._process is not None
    old = trial._process
    too_deep = '{"functions": [["f", ' + '{"a": ' * 5000 + "0" + "}" * 5000 + "]]}"
    for _ in range(2):
        with pytest.raises(ClientError, match="the answer cannot be used: maximum recursion depth") as caught:
            trial.check(GrammarSpec("answer", too_deep))  # which is refused by name long before, as a tool's schema
        assert caught.value.param == "grammar"
        trial.check(GOOD)
    assert old.returncode is not None
    assert trial._process.pid != old.pid


def test_no_process_is_left_after_close() -> None:
    trial = GrammarTrial(TokenBytes.of(demo_tokenizer()))
    trial.check(GOOD)
    assert trial._process is not None
    process = trial._process
    trial.close()
    trial.close()
    assert process.returncode is not None
    with pytest.raises(CapacityError):
        trial.check(GOOD)


def test_close_does_not_wait_for_a_grammar() -> None:
    trial = GrammarTrial(TokenBytes.of(demo_tokenizer()))
    trial.check(GOOD)
    assert trial._process is not None
    stop(trial._process)
    errors: list[Exception] = []

    def check() -> None:
        try:
            trial.check(GrammarSpec("regex", "c+"))
        except CapacityError as error:
            errors.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    time.sleep(0.1)
    trial.close()
    thread.join(5)
    assert len(errors) == 1
