"""Does a running stream keep its pace beside a long prompt, and the loop its promises under load?

    python -m aserve.bench.responsiveness

Three parts, one serving process with default settings on the loop that serves: gaps of a running stream alone and
while an 8,000-token prompt prefills beside it, against the longest step; the server's own measure of its loop's lag
with 32 streams to clients in another process, over SSE and over WebSockets; loop lag while hostile bodies arrive
(16 MiB of text, a 4 MB prompt, deep nesting). Medians of three runs.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import orjson
import uvloop

from aserve.bench.clients import http_request
from aserve.bench.report import format_table, percentile
from aserve.bench.workload import LengthRange, WorkloadShape, random_workload
from aserve.config import Config, ServerConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.metrics import Histogram
from aserve.request import SamplingParams
from aserve.server.loop_lag import LoopLag
from aserve.server.serve import running_server

PROBE_INTERVAL_S = 0.01
LAG_QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
NUM_TOKENS = 400  # of the stream whose gaps are timed

Row = dict[str, object]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each part (default: %(default)s)")
    parser.add_argument("--long-prompt", type=int, default=8000, help="tokens (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--output-len", type=int, default=100, help="tokens of each stream (default: %(default)s)")
    uvloop.run(_measure(parser.parse_args(argv)))


async def _measure(arguments: argparse.Namespace) -> None:
    config = Config(server=ServerConfig(port=0))
    runs = range(arguments.runs)
    engine = AsyncEngine(config.engine)
    async with engine, running_server(config, engine) as server:
        alone = [await measure_gaps(engine, long_prompt=0, seed=run) for run in runs]
        beside = [await measure_gaps(engine, long_prompt=arguments.long_prompt, seed=run) for run in runs]
        print(format_table([medians(alone), medians(beside)]))
        rows = []
        for transport in ("sse", "ws"):
            load = (transport, arguments.streams, arguments.output_len)
            lags = [await stream_lag(engine, server.url, server.loop_lag, *load, seed=run) for run in runs]
            rows.append({"streams": f"{arguments.streams} {transport}", **medians(lags)})
        print("\n" + format_table(rows))
        rows = []
        for name, body in hostile_bodies().items():
            lags = [describe_lag(await lag_during(lambda body=body: post(server.url, body))) for _ in runs]  # type: ignore[misc]
            rows.append({"body": name, **medians(lags)})
        print("\n" + format_table(rows))


def medians(rows: Sequence[Mapping[str, float]]) -> Row:
    """Return the median of each column."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


class StepTimes(Histogram):
    """Keeps the longest time."""

    longest_s = 0.0

    def observe(self, value: float) -> None:
        """Take the time of one step in seconds."""
        self.longest_s = max(self.longest_s, value)


async def measure_gaps(engine: AsyncEngine, *, long_prompt: int, seed: int) -> dict[str, float]:
    """Stream 400 tokens; after 20 of them let a long prompt arrive, and time the gaps until it has its first token.

    ``seed`` draws the prompts: no two runs may share them, or the prefix cache would do the work.
    """
    steps = engine.metrics.step_time = StepTimes("step_time_seconds", "Time of a step on the device.", ())
    lengths = LengthRange(max(32, long_prompt), max(32, long_prompt))
    shape = WorkloadShape(2, lengths, LengthRange(1, 1), 1000 * long_prompt + seed)
    items = random_workload(shape, engine.limits.vocab_size)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
    gaps: list[float] = []
    prefill: asyncio.Task[None] | None = None
    last = 0.0
    async for output in engine.generate(items[0].prompt_token_ids[:32], greedy):
        now = time.perf_counter()
        if prefill is not None or (not long_prompt and last):
            gaps.append(now - last)
        last = now
        if long_prompt and prefill is None and output.num_output_tokens >= 20:
            prefill = asyncio.create_task(_first_token(engine, items[1].prompt_token_ids))
        if prefill is not None and prefill.done():
            break
    if prefill is not None:
        await prefill
    return {
        "long prompt": long_prompt,
        "tokens seen": len(gaps),
        "gap p50 ms": 1e3 * percentile(gaps, 0.5),
        "gap p99 ms": 1e3 * percentile(gaps, 0.99),
        "gap max ms": 1e3 * max(gaps),
        "longest step ms": 1e3 * steps.longest_s,
    }


async def _first_token(engine: AsyncEngine, prompt: list[int]) -> None:
    async for _ in engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1)):
        pass


async def stream_lag(
    engine: AsyncEngine, url: str, loop_lag: LoopLag, transport: str, num_streams: int, output_len: int, *, seed: int
) -> dict[str, float]:
    """Return quantiles of the lag that the server measured while ``aserve bench serve`` streamed from it."""
    flags = {"num-prompts": num_streams, "concurrency": num_streams, "output-len": output_len, "input-len": 64}
    command = ["-m", "aserve", "bench", "serve", "--json", "-", "--url", url, "--transport", transport]
    command += [f"--{name}={value}" for name, value in flags.items()] + [f"--workload-seed={seed}"]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    report = asyncio.create_task(process.communicate())
    try:
        while engine.stats().num_open < num_streams and not report.done():  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(PROBE_INTERVAL_S)
        loop_lag.reset()  # neither the start of the other process nor its warm-up counts
        output, _ = await report
    finally:
        report.cancel()
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise SystemExit(f"the clients failed: {output.decode()}")
    return {f"lag {name} ms": 1e3 * loop_lag.quantile(share) for name, share in LAG_QUANTILES.items()}


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
    return {f"lag {name} ms": 1e3 * percentile(lags, share) for name, share in LAG_QUANTILES.items()}


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
