"""The synchronous facade for scripts: an engine on an event loop in a thread of its own."""

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from aserve.config import EngineConfig, load_config
from aserve.engine.async_engine import AsyncEngine
from aserve.engine.prompt_encoder import Prompt
from aserve.errors import AserveError, ConfigError, EngineDeadError
from aserve.request import FinishReason, SamplingParams, TokenLogprobs
from aserve.runner.base import ModelRunner
from aserve.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(slots=True)
class CompletedOutput:
    """The whole answer to one prompt. ``error`` says why there is none; ``finish_reason`` is then ERROR."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ERROR
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None


class LLM:
    """Load a model and complete lists of prompts. Works inside a running event loop (a notebook), too."""

    def __init__(
        self,
        model: EngineConfig | str | Path | None = None,
        *,
        runner: ModelRunner | None = None,
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ) -> None:
        """Load ``model`` and wait until it is ready.

        It is a whole EngineConfig, or a path or hub id with ``settings`` beside it; None is the demo model.
        """
        self._engine = AsyncEngine(_config(model, settings), runner=runner, tokenizer=tokenizer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aserve-llm", daemon=True)
        self._thread.start()
        try:
            self._wait_for(self._engine.start())
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[CompletedOutput]:
        """Complete every prompt (text, token ids or chat messages) and return the outputs in their order.

        ``params`` holds for all prompts, or there is one for each. A prompt that is refused has an ``error``.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts, but {len(params)} sampling parameters")
        if not self._thread.is_alive():
            raise EngineDeadError("the engine was closed")
        return self._wait_for(self._complete_all(prompts, params))

    def close(self) -> None:
        """Release the model. Idempotent."""
        if self._thread.is_alive():
            self._wait_for(self._engine.stop())
            self._end_loop()

    async def _complete_all(self, prompts: list[Prompt], params: Sequence[SamplingParams]) -> list[CompletedOutput]:
        """Keep the batch full, but the queue short."""
        outputs = [CompletedOutput() for _ in prompts]
        places = iter(range(len(prompts)))

        async def work() -> None:
            for place in places:
                await self._complete(prompts[place], params[place], outputs[place])

        num_workers = min(len(prompts), 2 * self._engine.limits.max_num_seqs, self._engine.config.max_queued_requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(work())
        return outputs

    async def _complete(self, prompt: Prompt, params: SamplingParams, completed: CompletedOutput) -> None:
        try:
            output = await self._engine.complete(prompt, params, request_id=uuid.uuid4().hex)
        except AserveError as error:
            completed.error = str(error)
            return
        assert output.finish_reason is not None  # the output is whole
        completed.text = output.text
        completed.token_ids = output.token_ids
        completed.num_prompt_tokens = output.num_prompt_tokens
        completed.num_output_tokens = output.num_output_tokens
        completed.num_cached_tokens = output.num_cached_tokens
        completed.stop_reason = output.stop_reason
        completed.finish_reason = output.finish_reason
        completed.logprobs = output.logprobs
        completed.prompt_logprobs = output.prompt_logprobs

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop's thread; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _config(model: EngineConfig | str | Path | None, settings: dict[str, Any]) -> EngineConfig:
    if isinstance(model, EngineConfig):
        if settings:
            raise ConfigError("settings belong into the EngineConfig")
        return model
    if model is not None:
        settings = settings | {"model": str(model)}
    return load_config(overrides={"engine": settings}).engine
