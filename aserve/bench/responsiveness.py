"""Does a running stream keep its pace beside a long prompt, and the loop its promises under load?

    python -m aserve.bench.responsiveness

Three parts, one process, default settings: gaps of a running stream alone and while an 8,000-token
prompt prefills beside it, against the longest step; loop lag with 32 streams; loop lag while hostile
bodies arrive (16 MiB of text, a 4 MB prompt, deep nesting).
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson

from aserve.bench.clients import http_request
from aserve.bench.report import format_table, percentile
from aserve.bench.workload import random_workload
from aserve.config import Config, EngineConfig, ServerConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.request import SamplingParams
from aserve.server.serve import running_server

PROBE_INTERVAL_S = 0.01


def main() -> None:
    """Run the parts and print a table of each."""
    asyncio.run(_measure())


async def _measure() -> None:
    async with AsyncEngine(EngineConfig(trace_steps=10_000)) as engine:
        print(format_table([await measure_gaps(engine, long_prompt=0), await measure_gaps(engine, long_prompt=8000)]))
        lags = await lag_during(lambda: run_streams(engine, 32))
        print("\n" + format_table([{"load": "32 streams", **describe_lag(lags)}]))
    config = Config(server=ServerConfig(port=0))
    async with AsyncEngine(config.engine) as engine, running_server(config, engine) as server:
        rows = []
        for name, body in hostile_bodies().items():
            lags = await lag_during(lambda body=body: post(server.url, body))  # type: ignore[misc]
            rows.append({"body": name, **describe_lag(lags)})
        print("\n" + format_table(rows))


async def measure_gaps(engine: AsyncEngine, *, long_prompt: int) -> dict[str, object]:
    """Stream 400 tokens; after 20 of them let a long prompt arrive, and time the gaps until it has its first token."""
    items = random_workload(2, max(1, long_prompt), 1, engine.limits.vocab_size, 1)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)
    gaps: list[float] = []
    prefill: asyncio.Task[None] | None = None
    last = 0.0
    async for output in engine.generate(items[0].prompt_token_ids[:32], greedy):
        now = time.perf_counter()
        if prefill is not None or not long_prompt:
            gaps.append(now - last)
        last = now
        if long_prompt and output.num_output_tokens == 20:
            prefill = asyncio.create_task(_first_token(engine, items[1].prompt_token_ids))
        if prefill is not None and prefill.done():
            break
    return {
        "long prompt": long_prompt,
        "tokens seen": len(gaps),
        "gap p50 ms": 1e3 * percentile(gaps, 0.5),
        "gap p99 ms": 1e3 * percentile(gaps, 0.99),
        "gap max ms": 1e3 * max(gaps),
        "longest step ms": 1e3 * longest_step_s(engine),
    }


def longest_step_s(engine: AsyncEngine) -> float:
    """Return the longest device time of a recorded step, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        lines = engine.dump_trace(Path(folder) / "trace.jsonl").read_bytes().splitlines()
    return max(float(event["tokens"]["step_time_s"]) for event in map(orjson.loads, lines) if "tokens" in event)


async def _first_token(engine: AsyncEngine, prompt: list[int]) -> None:
    async for _ in engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1)):
        pass


async def run_streams(engine: AsyncEngine, num_streams: int) -> None:
    """Decode 100 tokens in each of ``num_streams`` streams."""
    items = random_workload(num_streams, 64, 100, engine.limits.vocab_size, 2)

    async def consume(prompt: list[int]) -> None:
        async for _ in engine.generate(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=100)):
            pass

    await asyncio.gather(*(consume(item.prompt_token_ids) for item in items))


async def lag_during(work: Callable[[], Awaitable[object]]) -> list[float]:
    """Return by how much each tick of a 10 ms timer came late while ``work`` ran, in seconds."""
    lags: list[float] = []

    async def probe() -> None:
        while True:
            due = time.perf_counter() + PROBE_INTERVAL_S
            await asyncio.sleep(PROBE_INTERVAL_S)
            lags.append(time.perf_counter() - due)

    ticking = asyncio.create_task(probe())
    try:
        await work()
        await asyncio.sleep(5 * PROBE_INTERVAL_S)
    finally:
        ticking.cancel()
    return lags


def describe_lag(lags: list[float]) -> dict[str, float]:
    """Reduce lags to milliseconds."""
    return {
        "lag p50 ms": 1e3 * percentile(lags, 0.5),
        "lag p99 ms": 1e3 * percentile(lags, 0.99),
        "lag max ms": 1e3 * max(lags),
    }


def hostile_bodies() -> dict[str, bytes]:
    """Name bodies that stall a careless server."""
    chat = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}'
    return {
        "16 MiB of text": chat % (b"a" * ((16 << 20) - 128)),
        "4 MB prompt": b'{"prompt": "' + b"word " * 800_000 + b'"}',
        "nested 100,000 deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "200,000 messages": orjson.dumps({"messages": [{"role": "user", "content": "x"}] * 200_000}),
        "1,000,000 token ids": orjson.dumps({"prompt": [5] * 1_000_000}),
    }


async def post(url: str, body: bytes) -> bytes:
    """Send ``body`` and return the status line of the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    path = "/v1/completions" if b'"prompt"' in body[:32] else "/v1/chat/completions"
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(http_request("POST", path, host, {}, body))
        return await reader.readline()
    finally:
        writer.close()


if __name__ == "__main__":
    main()
