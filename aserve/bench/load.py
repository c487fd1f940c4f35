"""When requests are sent: an open loop sends each at its own time, a closed one keeps a number of them open.

A load is cut into shares, each for a process of its own, which all start at the same time.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aserve.bench.clients import LoadClient, LoadRequest, RequestTiming


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How a load arrives: ``rate`` requests per second at random times, or None for the closed loop.

    The closed loop's ``concurrency`` streams begin spread over ``stagger_s`` seconds.
    """

    concurrency: int = 1
    rate: float | None = None
    stagger_s: float = 0.0

    def starts_s(self, num_requests: int, seed: int) -> list[float]:
        """Return offsets in seconds: of each request in the open loop, of each stream in the closed one."""
        if self.rate is None:
            num_streams = min(self.concurrency, num_requests)
            return [stream * self.stagger_s / num_streams for stream in range(num_streams)]
        rng, now, starts = random.Random(f"arrivals {seed}"), 0.0, []
        for _ in range(num_requests):
            now += rng.expovariate(self.rate)
            starts.append(now)
        return starts


@dataclass(frozen=True, slots=True)
class LoadShare:
    """What one process sends: from each start on one request (``is_open``), or one after another till none is left."""

    requests: list[LoadRequest]
    starts_s: list[float]
    is_open: bool


def split_load(requests: Sequence[LoadRequest], arrivals: Arrivals, num_processes: int, seed: int) -> list[LoadShare]:
    """Deal requests and starts out in turn; there are at most as many shares as starts."""
    starts = arrivals.starts_s(len(requests), seed)
    count = min(num_processes, len(starts))
    is_open = arrivals.rate is not None
    return [LoadShare(list(requests[i::count]), starts[i::count], is_open) for i in range(count)]


async def run_share(client: LoadClient, share: LoadShare, start_s: float) -> list[RequestTiming]:
    """Send a share; ``start_s`` is the time on ``time.perf_counter`` from which starts count."""
    left = iter(share.requests)
    timings: list[RequestTiming] = []

    async def work(offset_s: float) -> None:
        await asyncio.sleep(start_s + offset_s - time.perf_counter())
        for request in left:
            timings.append(await client.complete(request))
            if share.is_open:
                return

    try:
        async with asyncio.TaskGroup() as group:
            for offset_s in share.starts_s:
                group.create_task(work(offset_s))
    finally:
        client.close()
    return timings
