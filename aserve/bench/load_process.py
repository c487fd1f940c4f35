"""One share of a load in a process of its own, so that neither the server nor other clients pay for it.

``python -m aserve.bench.load_process`` reads a job as one line of JSON, answers ``ready``, reads when to start (seconds
on the clock that all processes of a machine share), and writes the size of its result and the result, timings and CPU
time as JSON, when it is done.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import orjson
import uvloop

from aserve.bench.clients import LoadClient, LoadRequest, RequestTiming, Server
from aserve.bench.load import LoadShare, run_share
from aserve.bench.sse_client import Endpoint, SseClient
from aserve.bench.ws_client import WebSocketClient
from aserve.errors import AserveError

Transport = Literal["sse", "ws"]
READY = b"ready\n"


@dataclass(frozen=True, slots=True)
class Job:
    """What a process does."""

    server: Server
    transport: Transport
    endpoint: Endpoint
    share: LoadShare


@dataclass(frozen=True, slots=True)
class ShareResult:
    """What came of a share; ``cpu_share`` is the part of the time that its process computed, 1 is saturated."""

    timings: list[RequestTiming]
    cpu_share: float


def make_client(server: Server, transport: Transport, endpoint: Endpoint) -> LoadClient:
    """Return the client of a transport; ``endpoint`` is for SSE only."""
    return SseClient(server, endpoint) if transport == "sse" else WebSocketClient(server)


class LoadProcess:
    """The other side of the pipe."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    async def prepare(self, job: Job) -> None:
        """Hand the job over and wait until the process could start."""
        self._stdin.write(orjson.dumps(job) + b"\n")
        await self._stdin.drain()
        if await self._stdout.readline() != READY:
            raise AserveError("a client process did not start")

    async def run(self, start_s: float) -> ShareResult:
        """Let it begin at ``start_s`` and wait for its end."""
        self._stdin.write(f"{start_s!r}\n".encode())
        size = await self._stdout.readline()
        if not size:
            raise AserveError(f"a client process ended with status {await self._process.wait()}")
        result = orjson.loads(await self._stdout.readexactly(int(size)))
        return ShareResult([RequestTiming(**timing) for timing in result["timings"]], result["cpu_share"])

    async def stop(self) -> None:
        """End it, done or not; it has nothing left to do that matters."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def load_processes(jobs: Sequence[Job]) -> AsyncIterator[list[LoadProcess]]:
    """Start a process for each job, ready to begin; they end with the block."""
    started: list[LoadProcess] = []
    pipe = asyncio.subprocess.PIPE
    try:
        for _ in jobs:
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, stdin=pipe, stdout=pipe)
            started.append(LoadProcess(process))
        await asyncio.gather(*(process.prepare(job) for process, job in zip(started, jobs, strict=True)))
        yield started
    finally:
        for running in started:
            await running.stop()


def main() -> None:
    """Do one job."""
    job = _read_job(sys.stdin.buffer.readline())
    # With PYTHONUNBUFFERED, stdout.buffer is the bare file, and a write to a full pipe may take only a part.
    with open(sys.stdout.fileno(), "wb", closefd=False) as answers:
        answers.write(READY)
        answers.flush()
        result = uvloop.run(_run(job, float(sys.stdin.buffer.readline())))
        output = orjson.dumps(result)
        answers.write(b"%d\n%s" % (len(output), output))


def _read_job(line: bytes) -> Job:
    fields: dict[str, Any] = orjson.loads(line)
    share = fields["share"]
    requests = [LoadRequest(**request) for request in share["requests"]]
    share = LoadShare(requests, share["starts_s"], share["is_open"])
    return Job(Server(**fields["server"]), fields["transport"], fields["endpoint"], share)


async def _run(job: Job, start_s: float) -> ShareResult:
    client = make_client(job.server, job.transport, job.endpoint)
    cpu_s = time.process_time()
    timings = await run_share(client, job.share, start_s)
    busy_s = time.process_time() - cpu_s
    return ShareResult(timings, busy_s / (time.perf_counter() - start_s))


if __name__ == "__main__":
    main()
