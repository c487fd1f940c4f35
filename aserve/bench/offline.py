"""``aserve bench offline``: tokens per second of the engine alone, greedy, exact lengths, all requests at once."""

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import uvloop

from aserve.bench.report import format_table, print_result
from aserve.bench.workload import WORKLOADS, WorkloadItem, WorkloadShape, random_workload
from aserve.config import Config, EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.errors import AserveError
from aserve.request import Request, RequestOutput, SamplingParams

WARM_UP_OUTPUT_LEN = 32


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """One run, from the first submission to the last token.

    Rates are per second of wall time, prefill included. Times are medians over the requests: ``ttft_ms`` from
    submission to first token, queueing included; ``tpot_ms`` for each token after the first.
    """

    num_prompts: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Measure and print."""
    shape = workload_shape(arguments)
    name, runs = uvloop.run(measure(config.engine, shape, arguments.repeat, arguments.warmup))
    medians = {column: median(getattr(one, column) for one in runs) for column in asdict(runs[0])}
    result = {"model": name, "workload": asdict(shape), "median": medians, "runs": [asdict(one) for one in runs]}
    rows: list[dict[str, Any]] = [{"model": name, **asdict(one)} for one in runs]
    if len(runs) > 1:
        rows.append({"model": f"median of {len(runs)}", **medians})
    print_result(result, format_table(rows), arguments.json)
    return 0


def workload_shape(arguments: argparse.Namespace) -> WorkloadShape:
    """Return the named workload with what was given beside its name."""
    given = {
        "num_prompts": arguments.num_prompts,
        "input_lens": arguments.input_len,
        "output_lens": arguments.output_len,
        "seed": arguments.workload_seed,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(WORKLOADS[arguments.workload], **changes)


async def measure(
    config: EngineConfig, shape: WorkloadShape, num_runs: int, num_warm_up: int
) -> tuple[str, list[OfflineResult]]:
    """Return the model's name and the results of ``num_runs`` runs on one engine.

    No two runs have a prompt in common, and neither has the warm-up, so the prefix cache finds nothing.
    """
    config = dataclasses.replace(config, max_queued_requests=max(config.max_queued_requests, shape.num_prompts))
    async with AsyncEngine(config) as engine:
        vocab_size = engine.limits.vocab_size
        rehearsal = random_workload(shape, vocab_size, variant=num_runs)[:num_warm_up]
        if rehearsal:
            shortened = [dataclasses.replace(i, output_len=min(i.output_len, WARM_UP_OUTPUT_LEN)) for i in rehearsal]
            await run_once(engine, shortened)
        runs = [await run_once(engine, random_workload(shape, vocab_size, variant=n)) for n in range(num_runs)]
        return engine.model_name, runs


async def run_once(engine: AsyncEngine, items: Sequence[WorkloadItem]) -> OfflineResult:
    """Submit all ``items`` and wait for their last token; raises what a request failed with."""
    first_step, count = engine.metrics.num_steps, _Countdown(len(items))
    requests = [
        Request(
            request_id=f"bench-{number}",
            prompt_token_ids=tuple(item.prompt_token_ids),
            params=SamplingParams(temperature=0.0, max_tokens=item.output_len, ignore_eos=True),
        )
        for number, item in enumerate(items)
    ]
    start_s = time.perf_counter()
    sinks = [TimingSink(count, time.perf_counter()) for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.add(request, sink)
    await count.is_done
    duration_s = max(sink.last_s for sink in sinks) - start_s
    num_prompt_tokens = sum(len(item.prompt_token_ids) for item in items)
    num_output_tokens = sum(sink.num_tokens for sink in sinks)
    return OfflineResult(
        num_prompts=len(items),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_steps=engine.metrics.num_steps - first_step,
        duration_s=duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
        ttft_ms=1e3 * median(sink.first_s - sink.start_s for sink in sinks),
        tpot_ms=1e3 * median((sink.last_s - sink.first_s) / max(1, sink.num_tokens - 1) for sink in sinks),
    )


class _Countdown:
    """``is_done`` when all requests have ended, or with the error of the first that failed."""

    def __init__(self, num_requests: int) -> None:
        self.is_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_left = num_requests

    def end(self, error: AserveError | None = None) -> None:
        """Take note of the end of one request."""
        self._num_left -= 1
        if self.is_done.done():
            return
        if error is not None:
            self.is_done.set_exception(error)
        elif self._num_left == 0:
            self.is_done.set_result(None)


@dataclass(slots=True)
class TimingSink:
    """Counts tokens and keeps three times, in seconds on ``time.perf_counter``."""

    count: _Countdown
    start_s: float
    first_s: float = field(default=0.0)
    last_s: float = field(default=0.0)
    num_tokens: int = 0

    def put(self, output: RequestOutput) -> None:
        """Take what is new."""
        self.last_s = time.perf_counter()
        if not self.num_tokens:
            self.first_s = self.last_s
        self.num_tokens = output.num_output_tokens
        if output.finish_reason is not None:
            self.count.end()

    def fail(self, error: AserveError) -> None:
        """Take the request's failure as the run's."""
        self.count.end(error)
