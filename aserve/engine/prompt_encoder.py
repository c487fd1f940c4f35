"""Prompts to token ids, off the event loop, with cheap bounds checked before any work."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aserve.errors import ClientError
from aserve.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""

NUM_THREADS = 2


class PromptEncoder:
    """A small pool of threads over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, longest_token_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_chars = max_model_len * longest_token_bytes  # longer text cannot fit, however it is cut
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="aserve-encode")

    async def encode(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> list[int]:
        """Return the token ids of ``prompt``; raises ClientError if it is surely too long or cannot be rendered."""
        if isinstance(prompt, str):
            self._check_chars(len(prompt), "prompt")
            return await self._run(lambda: self._tokenizer.encode(prompt))
        if prompt and isinstance(prompt[0], Mapping):
            messages: list[Any] = list(prompt)
            self._check_count(len(messages), "messages")
            self._check_chars(count_chars(messages, self._max_chars), "messages")
            return await self._run(
                lambda: self._tokenizer.encode_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            )
        self._check_count(len(prompt), "prompt")
        token_ids: list[Any] = list(prompt)
        return token_ids

    def close(self) -> None:
        """Wait for jobs in progress and drop the others. Blocks."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _run(self, job: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, job)

    def _check_chars(self, num_chars: int, param: str) -> None:
        if num_chars > self._max_chars:
            raise _too_long(f"{num_chars} characters", self._max_model_len, param)

    def _check_count(self, count: int, param: str) -> None:
        if count > self._max_model_len:
            raise _too_long(f"{count} {'tokens' if param == 'prompt' else param}", self._max_model_len, param)


def count_chars(value: Any, enough: int) -> int:
    """Add up the lengths of all strings in ``value``, stopping once past ``enough``."""
    total, stack = 0, [value]
    while stack and total <= enough:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return total


def _too_long(what: str, max_model_len: int, param: str) -> ClientError:
    return ClientError(
        f"this model's context is {max_model_len} tokens, and {what} cannot fit",
        param=param,
        code="context_length_exceeded",
    )
