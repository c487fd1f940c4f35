"""``aserve bench offline``: tokens per second of the engine alone, greedy, exact lengths."""

import argparse
import asyncio
import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import uvloop

from aserve.bench.clients import LoadRequest, RequestTiming
from aserve.bench.load import Arrivals, LoadShare, run_share
from aserve.bench.report import format_table, print_result
from aserve.bench.summary import steady_window, tokens_within, tpot_ms, ttft_ms
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
    submission to first token, queueing included; ``tpot_ms`` for each token after the first. The steady part is that in
    which 95 % of the requests that ran together were open.
    """

    num_prompts: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    num_idle_launches: int  # steps whose launch found the device idle
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    steady_s: float
    steady_output_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Measure and print."""
    shape = workload_shape(arguments)
    arrivals = Arrivals(arguments.concurrency or shape.num_prompts, stagger_s=arguments.stagger_s)
    name, runs = uvloop.run(measure(config.engine, shape, arrivals, arguments.repeat, arguments.warmup))
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
    config: EngineConfig, shape: WorkloadShape, arrivals: Arrivals, num_runs: int, num_warm_up: int
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
            await run_once(engine, shortened, Arrivals(len(shortened)))
        runs = [await run_once(engine, random_workload(shape, vocab_size, n), arrivals) for n in range(num_runs)]
        return engine.model_name, runs


async def run_once(engine: AsyncEngine, items: Sequence[WorkloadItem], arrivals: Arrivals) -> OfflineResult:
    """Run all ``items``; raises what a request failed with."""
    first_step, first_idle = engine.metrics.num_steps, engine.stats().num_idle_launches
    requests = [LoadRequest(item.prompt_token_ids, item.output_len) for item in items]
    share = LoadShare(requests, arrivals.starts_s(len(items), seed=0), is_open=False)
    start_s = time.perf_counter()
    timings = await run_share(EngineClient(engine), share, start_s)
    if errors := [timing.error for timing in timings if timing.error]:
        raise AserveError(f"{len(errors)} of {len(items)} requests failed: {errors[0]}")
    duration_s = max(timing.end_s for timing in timings) - start_s
    num_prompt_tokens = sum(timing.num_prompt_tokens for timing in timings)
    num_output_tokens = sum(timing.num_output_tokens for timing in timings)
    steady = steady_window(timings, is_open_loop=False)
    return OfflineResult(
        num_prompts=len(items),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_steps=engine.metrics.num_steps - first_step,
        num_idle_launches=engine.stats().num_idle_launches - first_idle,
        duration_s=duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
        steady_s=steady.duration_s,
        steady_output_tokens_per_s=sum(tokens_within(timing, steady) for timing in timings) / steady.duration_s,
        ttft_ms=median(map(ttft_ms, timings)),
        tpot_ms=median(map(tpot_ms, timings)),
    )


class EngineClient:
    """Sends requests to an engine in this process, greedy and past the end of a text."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    async def complete(self, request: LoadRequest) -> RequestTiming:
        """Run one request, whose prompt is token ids, to its end."""
        assert not isinstance(request.prompt, str)
        sink = TimingSink(RequestTiming(time.perf_counter()), asyncio.get_running_loop().create_future())
        self._engine.add(
            Request(
                request_id=f"bench-{next(self._numbers)}",
                prompt_token_ids=tuple(request.prompt),
                params=SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True),
            ),
            sink,
        )
        await sink.is_done
        return sink.timing

    def close(self) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class TimingSink:
    """Takes the time of each output of one request."""

    timing: RequestTiming
    is_done: "asyncio.Future[None]"

    def put(self, output: RequestOutput) -> None:
        """Take what is new."""
        timing = self.timing
        timing.arrivals_s.append(time.perf_counter())
        if output.finish_reason is not None:
            timing.end_s = timing.arrivals_s[-1]
            timing.num_prompt_tokens, timing.num_output_tokens = output.num_prompt_tokens, output.num_output_tokens
            self.is_done.set_result(None)

    def fail(self, error: AserveError) -> None:
        """Take note of what went wrong."""
        self.timing.end_s, self.timing.error = time.perf_counter(), str(error)
        self.is_done.set_result(None)
