"""The pipe between the bench and its client processes."""

import asyncio
import dataclasses
from typing import Any

import pytest
from doubles_http import in_loop, live_server

from aserve.bench.clients import LoadRequest, Server
from aserve.bench.load import LoadShare
from aserve.bench.load_process import Job, load_processes
from aserve.errors import AserveError

JOB = Job(Server("http://127.0.0.1:9", "m"), "sse", "chat", LoadShare([LoadRequest("hi", 4)], [0.0], False))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@in_loop
async def test_results_larger_than_a_pipe_arrive_whole(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    share = LoadShare([LoadRequest([5, 6, 7], 2000)] * 12, [0.0] * 12, False)
    async with live_server() as live:
        job = Job(Server(live.url, "scripted"), "sse", "completions", share)
        async with load_processes([job, job]) as processes:
            results = await asyncio.gather(*(process.run(0.0) for process in processes))
    for result in results:
        assert [timing.num_output_tokens for timing in result.timings] == [2000] * 12
        assert sum(len(timing.arrivals_s) for timing in result.timings) > 4000  # at 20 bytes each


@in_loop
async def test_a_process_that_cannot_do_its_job_is_an_error() -> None:
    broken: Any = dataclasses.replace(JOB, share=None)  # type: ignore[arg-type]
    with pytest.raises(AserveError, match="a client process did not start"):
        async with load_processes([broken]):
            pass


@in_loop
async def test_a_process_that_is_killed_is_an_error() -> None:
    waiting = dataclasses.replace(JOB, share=LoadShare(JOB.share.requests, [600.0], False))
    async with load_processes([waiting]) as processes:
        running = asyncio.create_task(processes[0].run(asyncio.get_running_loop().time()))
        await asyncio.sleep(0.05)
        processes[0]._process.kill()
        with pytest.raises(AserveError, match="ended with status -9"):
            await running
