"""``aserve chat`` as a process: answers, interrupts and its end."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


class Chat:
    """A chat whose keyboard is a pipe."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "chat_scripted.py"), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        )
        self.seen = ""

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def wait_for(self, text: str, timeout_s: float = 20.0) -> str:
        """Return what was shown up to ``text``, and drop it."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            assert select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0], self.seen
            piece = os.read(self.process.stdout.fileno(), 1 << 16).decode()
            assert piece, f"the chat ended: {self.seen}"
            self.seen += piece
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close_keyboard(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@contextmanager
def chatting(*flags: str) -> Iterator[Chat]:
    chat = Chat(*flags)
    with chat.process:  # closes its pipes and waits
        try:
            chat.wait_for("ends an answer.\n")
            yield chat
        finally:
            chat.process.kill()


def test_interrupts_end_answers_and_at_the_prompt_the_chat() -> None:
    with chatting() as chat:
        for num_messages in (1, 3, 5):  # question and answer stay in the conversation
            chat.say("hi")
            chat.wait_for(str(num_messages) * 10)
            chat.interrupt()
            assert set(chat.wait_for("tokens/s]\n").partition("\n")[0]) <= {str(num_messages)}
        chat.say("wait")
        chat.wait_for("the device waits\n")
        chat.interrupt()  # before the first token: the question is as if never asked
        chat.say("hi")
        assert chat.wait_for("7" * 10) == ""
        chat.interrupt()
        chat.wait_for("tokens/s]\n")
        time.sleep(0.5)  # it is back at the prompt
        chat.interrupt()
        assert chat.process.wait(20) == 0
        assert chat.process.stdout is not None
        assert chat.process.stdout.read() == b""


def test_answers_end_by_themselves_and_the_end_of_input_ends_the_chat() -> None:
    with chatting("--max-tokens", "4", "--system", "be brief") as chat:
        chat.say("hi")
        chat.wait_for("2222\n[4 tokens, ")
        chat.say("and")
        chat.wait_for("4444\n[4 tokens, ")
        chat.say("x" * 5000)
        chat.wait_for("this model's maximum context length is 4096 tokens")
        chat.say("and")
        chat.wait_for("6666\n[4 tokens, ")
        chat.close_keyboard()
        assert chat.process.wait(20) == 0
