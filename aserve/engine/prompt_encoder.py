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

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_model_len
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="aserve-encode")

    async def encode(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None, continue_final_message: bool
    ) -> list[int]:
        """Return the token ids of ``prompt``; raises ClientError if it is too long or cannot be rendered."""
        if isinstance(prompt, str):
            self._check(self._tokenizer.min_tokens_for(len(prompt)), "prompt")
            return await self._run(lambda: self._tokenizer.encode(prompt, max_tokens=self._max_tokens))
        if prompt and isinstance(prompt[0], Mapping):
            self._check(len(prompt), "messages")  # no template gets by with less than a token for each
            self._check(self._tokenizer.min_tokens_for(count_chars(prompt)), "messages")
            return await self._run(
                lambda: self._tokenizer.encode_chat(
                    prompt,
                    tools=tools,
                    add_generation_prompt=not continue_final_message,
                    continue_final_message=continue_final_message,
                    max_tokens=self._max_tokens,
                )
            )
        self._check(len(prompt), "prompt")
        token_ids: list[Any] = list(prompt)
        return token_ids

    def close(self) -> None:
        """Wait for jobs in progress and drop the others. Blocks."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _run(self, job: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, job)

    def _check(self, num_tokens: int, param: str) -> None:
        if num_tokens > self._max_tokens:
            raise ClientError(
                f"this model's context is {self._max_tokens} tokens, and {param} needs at least {num_tokens}",
                param=param,
                code="context_length_exceeded",
            )


def count_chars(messages: Sequence[Any]) -> int:
    """Add up the characters of the messages' own text, as plain strings or as text parts."""
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else (content,)
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            total += len(text) if isinstance(text, str) else 0
    return total
