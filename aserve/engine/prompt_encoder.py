"""Prompts to token ids, off the event loop, with cheap bounds checked before any work.

What waits for a thread counts against ``max_queued_requests`` together with what waits for the device, so the line in
front of the scheduler's queue has the same end.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aserve.errors import CapacityError, ClientError, ContextLengthError
from aserve.tokenizer.spans import Span
from aserve.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""

NUM_THREADS = 2


class PromptEncoder:
    """A small pool of threads over one tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, max_model_len: int, *, max_queued_requests: int, num_waiting: Callable[[], int]
    ) -> None:
        """``num_waiting`` tells how many requests are past their encoding and wait for the device."""
        self.num_pending = 0  # callers whose prompt waits for a thread or is in one
        self._tokenizer = tokenizer
        self._max_tokens = max_model_len
        self._max_queued_requests = max_queued_requests
        self._num_waiting = num_waiting
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="aserve-encode")

    async def encode(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the token ids of ``prompt``; see ``AsyncEngine.encode``.

        Raises ClientError if it is too long, cannot be rendered or is no prompt at all, CapacityError if too many wait.
        """
        if isinstance(prompt, str):
            self._check(self._tokenizer.min_tokens_for(len(prompt)), "prompt")
            return await self._run(
                lambda: self._tokenizer.encode(prompt, add_special_tokens, max_tokens=self._max_tokens)
            )
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
            kind = type(prompt).__name__
            raise ClientError(f"a prompt is text, token ids or chat messages, not {kind}", param="prompt")
        if prompt and isinstance(prompt[0], Mapping):
            self._check(len(prompt), "messages")  # no template gets by with less than a token for each
            if not all(isinstance(message, Mapping) for message in prompt):
                raise ClientError("each message must be an object", param="messages")
            self._check(self._tokenizer.min_tokens_for(count_chars(prompt)), "messages")
            return await self._run(
                lambda: self._tokenizer.encode_chat(
                    prompt,
                    tools=tools,
                    add_generation_prompt=not continue_final_message,
                    continue_final_message=continue_final_message,
                    template_kwargs=template_kwargs,
                    max_tokens=self._max_tokens,
                )
            )
        self._check(len(prompt), "prompt")
        token_ids: list[Any] = list(prompt)
        return token_ids

    async def encode_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        known: Sequence[Span],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Span]:
        """Return the spans of a prompt of messages; see ``Tokenizer.encode_turn``. Raises what ``encode`` raises."""
        self._check(len(messages), "messages")
        self._check(self._tokenizer.min_tokens_for(count_chars(messages)), "messages")
        return await self._run(
            lambda: self._tokenizer.encode_turn(
                messages, known, tools=tools, template_kwargs=template_kwargs, max_tokens=self._max_tokens
            )
        )

    def close(self) -> None:
        """Wait for jobs in progress and drop the others. Blocks."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _run(self, job: Callable[[], list[T]]) -> list[T]:
        """Run ``job`` in a thread; if the caller is cancelled before it begins, it never does."""
        num_ahead = self.num_pending + self._num_waiting()
        if num_ahead >= self._max_queued_requests:
            raise CapacityError(f"{num_ahead} requests are waiting already")
        self.num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, job)
        finally:
            self.num_pending -= 1

    def _check(self, num_tokens: int, param: str) -> None:
        if num_tokens > self._max_tokens:
            raise ContextLengthError(num_tokens, self._max_tokens, param=param, is_exact=False)


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
