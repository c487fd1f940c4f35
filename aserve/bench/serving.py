"""``aserve bench serve``: latency and throughput of a running server, open or closed loop.

Terms as everywhere: TTFT time to first token, TPOT mean time per output token after the first, ITL
time between events that carry text, E2E whole request; goodput counts the requests within objectives.
"""

import argparse
import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import orjson

from aserve.bench.clients import LoadClient, RequestTiming, SseClient, WebSocketClient, served_model
from aserve.bench.report import format_table, percentile
from aserve.bench.workload import random_text
from aserve.config import Config


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests of which size arrive how."""

    num_prompts: int
    input_len: int
    output_len: int
    concurrency: int
    rate: float | None  # requests per second; None is the closed loop
    seed: int


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Measure and print; returns 1 if a request failed."""
    load = Load(
        arguments.num_prompts,
        arguments.input_len,
        arguments.output_len,
        arguments.concurrency,
        arguments.rate,
        arguments.workload_seed,
    )
    key = arguments.key or os.environ.get("ASERVE_API_KEY")
    duration_s, timings = asyncio.run(
        _measure(arguments.url.rstrip("/"), arguments.transport, key, arguments.timeout, load)
    )
    summary = summarise(timings, duration_s, arguments.goodput_ttft_ms, arguments.goodput_tpot_ms)
    print(orjson.dumps(summary).decode() if arguments.json else format_summary(summary))
    return int(any(timing.error for timing in timings))


async def _measure(
    url: str, transport: str, key: str | None, timeout_s: float, load: Load
) -> tuple[float, list[RequestTiming]]:
    model = await served_model(url, key)
    client: LoadClient = (SseClient if transport == "sse" else WebSocketClient)(url, model, key, timeout_s)
    await client.complete("warm up", 4)
    start = time.perf_counter()
    timings = await run_load(client, load)
    return time.perf_counter() - start, timings


async def run_load(client: LoadClient, load: Load) -> list[RequestTiming]:
    """Send all requests; the closed loop keeps ``concurrency`` of them open, the open loop draws arrivals."""
    rng = random.Random(load.seed)
    gate = asyncio.Semaphore(load.concurrency if load.rate is None else load.num_prompts)

    async def send(prompt: str) -> RequestTiming:
        try:
            return await client.complete(prompt, load.output_len)
        finally:
            gate.release()

    async with asyncio.TaskGroup() as group:
        tasks = []
        async for prompt in _arrivals(load, rng):
            await gate.acquire()
            tasks.append(group.create_task(send(prompt)))
    return [task.result() for task in tasks]


async def _arrivals(load: Load, rng: random.Random) -> AsyncIterator[str]:
    for _ in range(load.num_prompts):
        if load.rate is not None:
            await asyncio.sleep(rng.expovariate(load.rate))
        yield random_text(load.input_len, rng)


def summarise(
    timings: list[RequestTiming], duration_s: float, good_ttft_ms: float | None, good_tpot_ms: float | None
) -> dict[str, object]:
    """Reduce timings to rates and percentiles (ms)."""
    done = [timing for timing in timings if timing.error is None and timing.arrivals_s]
    ttft = [1e3 * (timing.arrivals_s[0] - timing.start_s) for timing in done]
    tpot = [_tpot_ms(timing) for timing in done]
    itl = [1e3 * (b - a) for timing in done for a, b in zip(timing.arrivals_s, timing.arrivals_s[1:], strict=False)]
    e2e = [1e3 * (timing.end_s - timing.start_s) for timing in done]
    good = sum(
        (good_ttft_ms is None or first <= good_ttft_ms) and (good_tpot_ms is None or per_token <= good_tpot_ms)
        for first, per_token in zip(ttft, tpot, strict=True)
    )
    num_tokens = sum(timing.num_output_tokens for timing in done)
    errors = [timing.error for timing in timings if timing.error]
    return {
        "requests": len(timings),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "duration_s": duration_s,
        "requests_per_s": len(done) / duration_s,
        "output_tokens_per_s": num_tokens / duration_s,
        "goodput_requests_per_s": good / duration_s,
        **{
            f"{name}_ms": {f"p{round(share * 100)}": percentile(values, share) for share in (0.5, 0.9, 0.99)}
            for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2e", e2e))
        },
    }


def _tpot_ms(timing: RequestTiming) -> float:
    return 1e3 * (timing.arrivals_s[-1] - timing.arrivals_s[0]) / max(1, timing.num_output_tokens - 1)


def format_summary(summary: dict[str, object]) -> str:
    """Lay the summary out for a terminal: the totals, then a table of latencies."""
    totals = [f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"
              for name, value in summary.items() if not isinstance(value, dict)]  # fmt: skip
    rows = [{"latency": name, **value} for name, value in summary.items() if isinstance(value, dict)]
    return "\n".join(totals) + "\n\n" + format_table(rows)
