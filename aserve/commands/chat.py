"""``aserve chat``: a conversation in the terminal, with the engine in this process."""

import argparse
import asyncio
import sys
import time

from aserve.commands.sampling import sampling_params
from aserve.config import Config
from aserve.engine.async_engine import AsyncEngine
from aserve.errors import ClientError
from aserve.request import SamplingParams

Message = dict[str, str]


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Talk until the end of the input."""
    asyncio.run(_converse(config, arguments.system, sampling_params(arguments)))
    return 0


async def _converse(config: Config, system: str | None, params: SamplingParams) -> None:
    async with AsyncEngine(config.engine) as engine:
        print(
            f"{engine.model_name} is ready. An empty line or Ctrl-D ends the chat, Ctrl-C ends an answer.",
            file=sys.stderr,
        )
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        while text := await asyncio.to_thread(_read_line):
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": await _answer(engine, messages, params)})
            except ClientError as error:
                print(f"aserve: {error}", file=sys.stderr)
                messages.pop()


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


async def _answer(engine: AsyncEngine, messages: list[Message], params: SamplingParams) -> str:
    """Print the answer as it comes; an interrupt keeps what was said so far."""
    pieces: list[str] = []
    start, num_tokens = time.perf_counter(), 0
    try:
        async for output in engine.generate(messages, params):
            pieces.append(output.text)
            num_tokens = output.num_output_tokens
            print(output.text, end="", flush=True)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not pieces:
            raise
        task.uncancel()  # Ctrl-C during an answer ends the answer, not the chat
    print(f"\n[{num_tokens} tokens, {num_tokens / (time.perf_counter() - start):.1f} tokens/s]", file=sys.stderr)
    return "".join(pieces)
