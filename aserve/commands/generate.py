"""``aserve generate``: prompts in, completions out, as JSON lines in the order of the prompts.

A line is written as soon as it and those before it are done, so an interrupt keeps what was finished.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from aserve.commands.prompt_lines import PromptLine, read_lines
from aserve.commands.sampling import sampling_params
from aserve.config import Config, EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.errors import AserveError, ClientError
from aserve.request import RequestOutput

Answer = dict[str, Any]
"""What is written for one prompt; it has ``error`` if there is no completion."""


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Complete every prompt; returns 1 if one of them failed."""
    defaults = sampling_params(arguments)
    lines = [PromptLine(prompt, defaults) for prompt in arguments.prompt]
    if arguments.input:
        with _open(arguments.input, "rb", sys.stdin.buffer) as source:
            lines.extend(read_lines(source, defaults))
    if not lines:
        raise ClientError("nothing to generate: give --prompt or --input")
    num_failed = 0
    with _open(arguments.output, "wb", sys.stdout.buffer) as target:

        def write(answer: Answer) -> None:
            nonlocal num_failed
            num_failed += "error" in answer
            target.write(orjson.dumps(answer, option=orjson.OPT_APPEND_NEWLINE))
            target.flush()

        asyncio.run(complete_all(config.engine, lines, write))
    return int(num_failed > 0)


def _open(name: str, mode: Literal["rb", "wb"], standard: IO[bytes]) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open a file, or borrow a standard stream for '-'."""
    if name == "-":
        return contextlib.nullcontext(standard)
    try:
        return Path(name).open(mode)
    except OSError as error:
        raise ClientError(f"cannot open {name}: {error.strerror}") from error


async def complete_all(config: EngineConfig, lines: Sequence[PromptLine], write: Callable[[Answer], None]) -> None:
    """Run the lines and hand their answers to ``write`` in order; the batch is kept full, the queue short."""
    loop = asyncio.get_running_loop()
    answers: list[asyncio.Future[Answer]] = [loop.create_future() for _ in lines]
    places = iter(range(len(lines)))
    async with AsyncEngine(config) as engine, asyncio.TaskGroup() as group:

        async def work() -> None:
            for place in places:
                answers[place].set_result(await _complete(engine, lines[place]))

        for _ in range(min(len(lines), 2 * engine.limits.max_num_seqs, config.max_queued_requests)):
            group.create_task(work())
        for answer in answers:
            write(await answer)


async def _complete(engine: AsyncEngine, line: PromptLine) -> Answer:
    if line.error is not None:
        return line.labels | {"error": line.error}
    whole: RequestOutput | None = None
    try:
        async for output in engine.generate(line.prompt, line.params):
            if whole is None:
                whole = output
            else:
                whole.merge(output)
    except AserveError as error:
        return line.labels | {"error": str(error)}
    assert whole is not None  # a request ends with an output or an error
    return line.labels | _describe(whole)


def _describe(output: RequestOutput) -> Answer:
    answer: Answer = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_output_tokens": output.num_output_tokens,
        "num_cached_tokens": output.num_cached_tokens,
    }
    for name in ("logprobs", "prompt_logprobs"):
        if (entries := getattr(output, name)) is not None:
            answer[name] = entries
    return answer
