"""``aserve chat``: a conversation in the terminal, with the engine in this process."""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from aserve.commands.sampling import sampling_params
from aserve.config import Config
from aserve.engine.async_engine import AsyncEngine
from aserve.engine.parts import run_in_thread
from aserve.errors import ClientError
from aserve.request import SamplingParams

Message = dict[str, str]
T = TypeVar("T")


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Talk until the end of the input."""
    keyboard = Keyboard()
    asyncio.run(_converse(config, keyboard, arguments.system, sampling_params(arguments)))
    if keyboard.is_read:
        # A thread that waits for a line cannot be stopped, and holds a lock that the interpreter wants at its end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


class Keyboard:
    """Standard input, read in threads that need not end, so that an interrupt at the prompt is not kept waiting."""

    def __init__(self) -> None:
        self._line: Future[str] | None = None

    @property
    def is_read(self) -> bool:
        """True while a thread waits for a line."""
        return self._line is not None and not self._line.done()

    async def read_line(self) -> str:
        """Return the next line; empty at the end of the input."""
        self._line = run_in_thread(_read_line, "aserve-keyboard")
        return await asyncio.shield(asyncio.wrap_future(self._line))


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


async def _converse(config: Config, keyboard: Keyboard, system: str | None, params: SamplingParams) -> None:
    async with AsyncEngine(config.engine) as engine:
        print(
            f"{engine.model_name} is ready. An empty line or Ctrl-D ends the chat, Ctrl-C ends an answer.",
            file=sys.stderr,
        )
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        while text := await _until_interrupt(keyboard.read_line()):
            messages.append({"role": "user", "content": text})
            pieces: list[str] = []
            try:
                await _until_interrupt(_answer(engine, messages, params, pieces))
            except ClientError as error:
                print(f"aserve: {error}", file=sys.stderr)
            if pieces:
                messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                messages.pop()  # the next question starts where this one did


async def _until_interrupt(work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``work``, or None if Ctrl-C cancelled it."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()
    finally:
        task.cancel()
        loop.remove_signal_handler(signal.SIGINT)


async def _answer(engine: AsyncEngine, messages: list[Message], params: SamplingParams, pieces: list[str]) -> None:
    """Print the answer as it comes and collect it in ``pieces``."""
    start, num_tokens = time.perf_counter(), 0
    try:
        async for output in engine.generate(messages, params):
            pieces.append(output.text)
            num_tokens = output.num_output_tokens
            print(output.text, end="", flush=True)
    finally:
        if num_tokens:
            rate = num_tokens / (time.perf_counter() - start)
            print(f"\n[{num_tokens} tokens, {rate:.1f} tokens/s]", file=sys.stderr)
