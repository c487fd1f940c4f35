"""``aserve bench serve`` against a live server, and against servers that misbehave."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from doubles_http import in_loop, live_server

from aserve.bench.clients import LoadClient, SseClient, WebSocketClient
from aserve.bench.serving import Load, run_load
from aserve.cli import main

CLIENTS = [SseClient, WebSocketClient]
LOAD = Load(num_prompts=5, input_len=8, output_len=8, concurrency=2, rate=None, seed=0)


@asynccontextmanager
async def raw_server(answer: Any) -> AsyncIterator[str]:
    """Answer every connection with ``answer`` and close it; None never answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if answer is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("transport", ["sse", "websocket"])
@pytest.mark.parametrize("arrival", [["--concurrency", "4"], ["--rate", "200"]], ids=["closed", "open"])
def test_every_request_and_token_is_counted(
    transport: str, arrival: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    @in_loop
    async def measure() -> None:
        async with live_server(step_time_s=0.002) as live:
            flags = ["--url", live.url, "--transport", transport, "--num-prompts", "10", *arrival]
            lengths = ["--input-len", "12", "--output-len", "8", "--json"]
            assert await asyncio.to_thread(main, ["bench", "serve", *flags, *lengths]) == 0
            assert live.engine.metrics.num_aborts == 0

    measure()
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["failed"], summary["first_error"]) == (10, 0, None)
    assert summary["output_tokens_per_s"] * summary["duration_s"] == pytest.approx(10 * 8)
    assert summary["goodput_requests_per_s"] == summary["requests_per_s"]
    assert 2 <= summary["ttft_ms"]["p50"] <= summary["e2e_ms"]["p50"]
    assert 1 < summary["tpot_ms"]["p50"] < summary["e2e_ms"]["p50"]


def test_the_table_and_the_goodput_of_an_objective_that_nothing_meets(capsys: pytest.CaptureFixture[str]) -> None:
    @in_loop
    async def measure() -> None:
        async with live_server(step_time_s=0.002) as live:
            flags = ["--url", live.url, "--num-prompts", "2", "--output-len", "4", "--goodput-ttft-ms", "0.001"]
            assert await asyncio.to_thread(main, ["bench", "serve", *flags]) == 0

    measure()
    text = capsys.readouterr().out
    assert "goodput_requests_per_s: 0\n" in text
    assert "| latency | p50 | p90 | p99 |" in text


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 503 Full\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
@in_loop
async def test_a_server_that_answers_wrongly_fails_each_request_only(client: Any, answer: bytes) -> None:
    async with raw_server(answer) as url:
        timings = await run_load(client(url, "m", None), LOAD)
    assert len(timings) == LOAD.num_prompts
    assert all(timing.error and not timing.arrivals_s for timing in timings)


@pytest.mark.parametrize("client", CLIENTS)
@in_loop
async def test_a_server_that_never_answers_fails_the_request_in_time(client: Any) -> None:
    async with raw_server(None) as url:
        waiting: LoadClient = client(url, "m", None, timeout_s=0.2)
        timing = await asyncio.wait_for(waiting.complete("hi", 4), 5)
    assert timing.error == "not complete after 0.2 s"


def test_no_server_is_an_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err
