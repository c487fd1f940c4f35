"""``aserve bench offline``: tokens per second of the engine alone, greedy, exact lengths."""

import argparse
import asyncio
import time
from dataclasses import asdict, dataclass

import orjson

from aserve.bench.report import format_table
from aserve.bench.workload import WorkloadItem, random_workload
from aserve.config import Config, EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.request import SamplingParams


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """One run; rates in tokens per second of wall time, prefill included."""

    model: str
    num_prompts: int
    num_prompt_tokens: int
    num_output_tokens: int
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Measure and print."""
    result = asyncio.run(
        measure(
            config.engine, arguments.num_prompts, arguments.input_len, arguments.output_len, arguments.workload_seed
        )
    )
    print(orjson.dumps(result).decode() if arguments.json else format_table([asdict(result)]))
    return 0


async def measure(config: EngineConfig, num_prompts: int, input_len: int, output_len: int, seed: int) -> OfflineResult:
    """Run the requests with the batch full and the queue short; timed from the first submission to the last token."""
    async with AsyncEngine(config) as engine:
        items = random_workload(num_prompts, input_len, output_len, engine.limits.vocab_size, seed)
        start = time.perf_counter()
        num_output_tokens = await _complete_all(engine, items)
        duration_s = time.perf_counter() - start
        name = engine.model_name
    num_prompt_tokens = num_prompts * input_len
    return OfflineResult(
        model=name,
        num_prompts=num_prompts,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        duration_s=duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
    )


async def _complete_all(engine: AsyncEngine, items: list[WorkloadItem]) -> int:
    """Return the number of tokens generated."""
    left = iter(items)

    async def work() -> int:
        return sum([await _complete(engine, item) for item in left])

    num_workers = min(len(items), 2 * engine.limits.max_num_seqs, engine.config.max_queued_requests)
    return sum(await asyncio.gather(*(work() for _ in range(num_workers))))


async def _complete(engine: AsyncEngine, item: WorkloadItem) -> int:
    params = SamplingParams(temperature=0.0, max_tokens=item.output_len, ignore_eos=True)
    num_tokens = 0
    async for output in engine.generate(item.prompt_token_ids, params):
        num_tokens = output.num_output_tokens
    return num_tokens
