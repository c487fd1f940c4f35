"""For tests of whole engines on the demo model, read once for each device and dtype, and requests that run together."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from doubles_engine import until

from aserve.config import EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.model_files import ModelFiles
from aserve.request import RequestOutput, SamplingParams
from aserve.scheduler.stats import SchedulerStats
from aserve.tokenizer.load import load_tokenizer
from aserve.weights.load import LoadedModel, load_model

DEVICE = "cuda"  # "cpu" runs what does not need a GPU there, slowly
MakeEngine = Callable[..., AsyncEngine]
EXACT = {"dtype": "float32", "attention_backend": "torch"}


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@contextmanager
def demo_engines(files: ModelFiles) -> Iterator[MakeEngine]:
    """Offer engines of the demo model, made of settings as they always are; float32 and DEVICE unless said."""
    tokenizer = load_tokenizer(files)
    loaded: dict[Any, LoadedModel] = {}

    def load_once(files: ModelFiles, *, device: torch.device, dtype: torch.dtype, **options: Any) -> LoadedModel:
        if (device, dtype) not in loaded:
            loaded[device, dtype] = load_model(files, device=device, dtype=dtype, **options)
        return loaded[device, dtype]

    def make(**settings: Any) -> AsyncEngine:
        return AsyncEngine(EngineConfig(**{"device": DEVICE, "quantization": "none"} | settings), tokenizer=tokenizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aserve.runner.build.load_model", load_once)
        yield make


async def complete_all(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | SamplingParams
) -> list[RequestOutput]:
    """Run all prompts together."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    pairs = zip(prompts, each, strict=True)
    return list(await asyncio.gather(*(engine.complete(list(prompt), wanted) for prompt, wanted in pairs)))


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return the tokens of each output."""
    return [output.token_ids for output in outputs]


async def settled_stats(engine: AsyncEngine) -> SchedulerStats:
    """Wait until nothing runs; check that every page is free or cached; return the counts."""
    await until(lambda: not engine.stats().scheduler.num_in_flight)
    assert engine._steps is not None
    engine._steps.scheduler.check_integrity()
    stats = engine.stats().scheduler
    assert (stats.num_running, stats.num_waiting, stats.num_held_pages) == (0, 0, 0)
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    return stats
