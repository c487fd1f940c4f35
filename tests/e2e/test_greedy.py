"""Greedy tokens equal transformers' whatever the engine does with the batch (invariant 8).

The reference is committed (tests/reference), made by transformers from the same GGUF weights in fp32. Where its two
best logits lie within 1e-3 of each other another token is no error, and that prompt is compared up to there; at least
90 % of all tokens must have been compared.
"""

import asyncio
import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from aserve.config import EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.kernels.choose import choose_operators
from aserve.model_files import ModelFiles
from aserve.request import SamplingParams
from aserve.scheduler.stats import SchedulerStats
from aserve.tokenizer.load import load_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer
from aserve.weights.load import LoadedModel, load_model

REFERENCE = Path(__file__).resolve().parent.parent / "reference" / "greedy_reference.json"
MakeEngine = Callable[[EngineConfig], AsyncEngine]
MIN_MARGIN = 1e-3
MIN_COMPARED = 0.9


@dataclass(frozen=True)
class Case:
    """One way to run the same prompts; the defaults are the base of the single factors."""

    batched: bool = True
    prefix_cache: bool = True
    chunk: int = 4096  # max_num_batched_tokens
    page_size: int = 16
    overlap: bool = True
    small_pool: bool = False
    backend: str = "auto"

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(changed) or "base"

    def config(self, longest: int) -> EngineConfig:
        """The pool of a small case holds the longest sequence and little more."""
        pool_tokens = longest * 2 if self.small_pool else 32 * longest
        return EngineConfig(
            quantization="none",
            dtype="float32",
            attention_backend=self.backend,
            prefix_cache=self.prefix_cache,
            max_num_batched_tokens=self.chunk,
            page_size=self.page_size,
            overlap=self.overlap,
            num_pages=-(-pool_tokens // self.page_size) + 1,
            max_model_len=longest + 1,
        )


FACTORS: dict[str, tuple[Any, ...]] = {
    "batched": (True, False),
    "prefix_cache": (True, False),
    "chunk": (4096, 64, 7),
    "page_size": (16, 1),
    "overlap": (True, False),
    "small_pool": (False, True),
    "backend": ("auto", "torch"),
}


def single_factors() -> Iterator[Case]:
    """The base, then each other value of each factor alone; and the cache off where it is hit with it on."""
    yield Case()
    for name, (_, *others) in FACTORS.items():
        yield from (Case(**{name: value}) for value in others)
    yield Case(prefix_cache=False, chunk=64)


def grid() -> list[Case]:
    """Every combination; a single sequence never runs out of pages, so the small pool is for batches only."""
    cases = [Case(**dict(zip(FACTORS, values, strict=True))) for values in itertools.product(*FACTORS.values())]
    return [case for case in cases if case.batched or not case.small_pool]


def random_combinations(count: int) -> list[Case]:
    """The same few combinations each time; those of single sequences or tiny chunks would take minutes."""
    batched = [case for case in grid() if case.batched and case.chunk >= 64]
    return random.Random(7).sample(batched, count)


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads(REFERENCE.read_text())["prompts"]
    assert len(prompts) == 32
    assert all(len(prompt["output_token_ids"]) == 64 for prompt in prompts)
    return prompts


@pytest.fixture(scope="module")
def loaded_model(demo_files: ModelFiles) -> LoadedModel:
    cpu = torch.device("cpu")
    operators = choose_operators(cpu)
    return load_model(demo_files, device=cpu, dtype=torch.float32, quantization="none", operators=operators)


@pytest.fixture(scope="module")
def tokenizer(demo_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(demo_files)


@pytest.fixture
def make_engine(loaded_model: LoadedModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Engines as they always are built, around weights that were read once for all cases."""

    def reuse_model(*_: Any, dtype: torch.dtype, quantization: str, **__: Any) -> LoadedModel:
        assert (dtype, quantization) == (torch.float32, "none")
        return loaded_model

    monkeypatch.setattr("aserve.runner.build.load_model", reuse_model)
    return functools.partial(AsyncEngine, tokenizer=tokenizer)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*single_factors(), *random_combinations(6)], ids=str)
def test_greedy_tokens_equal_transformers(case: Case, make_engine: MakeEngine, reference: list[dict[str, Any]]) -> None:
    check(case, make_engine, reference)


@pytest.mark.full
@pytest.mark.parametrize("case", grid(), ids=str)
def test_greedy_tokens_equal_transformers_on_the_whole_grid(
    case: Case, make_engine: MakeEngine, reference: list[dict[str, Any]]
) -> None:
    check(case, make_engine, reference)


def check(case: Case, make_engine: MakeEngine, reference: list[dict[str, Any]]) -> None:
    """Run all prompts and compare by the margin rule."""
    outputs, stats = asyncio.run(complete(case, make_engine, reference))
    num_preemptions = stats.num_preemptions
    assert bool(num_preemptions) == (case.small_pool and case.batched), "preemption is what the small pool is for"
    if not case.small_pool and (not case.batched or case.chunk < 4096):  # else all prompts start in one step
        assert bool(stats.num_prefix_tokens_hit) == case.prefix_cache, "the prompts share beginnings"
    num_compared = 0
    for prompt, output in zip(reference, outputs, strict=True):
        clear = list(itertools.takewhile(lambda margin: margin >= MIN_MARGIN, prompt["margins"]))
        assert output[: len(clear)] == prompt["output_token_ids"][: len(clear)], prompt["name"]
        assert len(output) == 64
        num_compared += len(clear)
    assert num_compared >= MIN_COMPARED * 64 * len(reference)


async def complete(
    case: Case, make_engine: MakeEngine, reference: list[dict[str, Any]]
) -> tuple[list[list[int]], SchedulerStats]:
    """Return the tokens of each prompt and the counts at the end."""
    longest = max(len(prompt["prompt_token_ids"]) for prompt in reference) + 64
    async with make_engine(case.config(longest)) as engine:
        prompts = [prompt["prompt_token_ids"] for prompt in reference]
        if case.batched:
            outputs = await asyncio.gather(*(one(engine, prompt) for prompt in prompts))
        else:
            outputs = [await one(engine, prompt) for prompt in prompts]
        return list(outputs), engine.stats().scheduler


async def one(engine: AsyncEngine, prompt: list[int]) -> list[int]:
    """Return 64 greedy tokens."""
    token_ids: list[int] = []
    async for output in engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)):
        token_ids += output.token_ids
    return token_ids
