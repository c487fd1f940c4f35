"""Short requests beside a load: how soon does somebody new get an answer?"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aserve.bench.clients import LoadClient, LoadRequest, RequestTiming
from aserve.bench.dataset import TextScale, random_text
from aserve.bench.summary import Summary, Window, describe, ttft_ms

OUTPUT_LEN = 2


@dataclass(frozen=True, slots=True)
class Probe:
    """A new prompt of about ``input_len`` tokens every ``interval_s`` seconds, answered or not."""

    interval_s: float
    input_len: int
    scale: TextScale
    variant: int


@asynccontextmanager
async def probing(client: LoadClient, probe: Probe | None, start_s: float) -> AsyncIterator[list[RequestTiming]]:
    """Send probes from ``start_s`` on until the block ends; the timings are complete after it."""
    timings: list[RequestTiming] = []
    if probe is None:
        yield timings
        return
    tasks: set[asyncio.Task[None]] = set()
    sender = asyncio.create_task(_send(client, probe, start_s, timings, tasks))
    try:
        yield timings
    finally:
        sender.cancel()
        await asyncio.gather(sender, *tasks, return_exceptions=True)


async def _send(
    client: LoadClient, probe: Probe, start_s: float, timings: list[RequestTiming], tasks: set[asyncio.Task[None]]
) -> None:
    rng = random.Random(f"probe {probe.variant}")

    async def ask(prompt: str) -> None:
        timings.append(await client.complete(LoadRequest(prompt, OUTPUT_LEN)))

    due_s = start_s
    while True:
        due_s += probe.interval_s
        await asyncio.sleep(due_s - time.perf_counter())
        tasks.add(asyncio.create_task(ask(random_text(probe.scale.words_for(probe.input_len), rng))))


def summarise_probes(timings: Sequence[RequestTiming], steady: Window) -> Summary:
    """Reduce probes to their times to first token, ms, in the whole run and in its steady part."""
    done = [timing for timing in timings if timing.error is None and timing.arrivals_s]
    errors = [timing.error for timing in timings if timing.error]
    return {
        "requests": len(timings),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "ttft_ms": describe([ttft_ms(timing) for timing in done]),
        "steady_requests": sum(timing.start_s in steady for timing in done),
        "steady_ttft_ms": describe([ttft_ms(timing) for timing in done if timing.start_s in steady]),
    }
