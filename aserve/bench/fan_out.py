"""CPU time for a WebSocket frame on its way from the step loop to the socket, and the step loop's pace beside it.

    python -m aserve.bench.fan_out

First table: one token a round for each of the connections. `sink` is the server's own path, from the engine's sink
to the transport; `plain` a task for each stream that takes tokens from a queue and sends them through Starlette and
uvicorn's own protocol; `floor` prebuilt bytes to the transport. They take turns within one run. CPU time is that of
the event loop's thread, system calls included; the clients live in another process. Second table: the whole engine
with a device that takes 10 ms a step, all streams running.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import orjson
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from aserve.bench.report import format_table, percentile
from aserve.bench.socket_crowd import crowd
from aserve.config import Config, EngineConfig
from aserve.demo_model import find_demo_model
from aserve.engine.async_engine import AsyncEngine
from aserve.engine.sink import Sink
from aserve.metrics import Histogram
from aserve.request import Request, RequestOutput
from aserve.runner.scripted import ScriptedRunner
from aserve.scheduler.limits import Limits
from aserve.server.app import create_app
from aserve.server.http_protocol import HttpProtocol
from aserve.server.serve import EmbeddedServer
from aserve.server.transport import EXTENSION
from aserve.server.ws_protocol import WebSocketProtocol, text_frame_header
from aserve.tokenizer.load import load_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer

TEXT = " token"
ROUND_S = 0.01  # as long as a step
LONG_FRAME = 126  # bytes from which the client's one kind of header fits
CREATE = {"type": "response.create", "input": "hi", "ignore_eos": True}


@dataclass(slots=True)
class FrameCosts:
    """CPU microseconds for a frame, by way; one entry a repeat."""

    by_way: dict[str, list[float]] = field(default_factory=dict)

    def ratio_to_floor(self, way: str) -> float:
        """Return the best ratio of ``way`` to the floor that was timed beside it."""
        pairs = zip(self.by_way[way], self.by_way["floor"], strict=True)
        return min(cost / floor for cost, floor in pairs)

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield a row for each way."""
        for way, costs in self.by_way.items():
            yield {
                "way": way,
                "us a frame, median": median(costs),
                "best": min(costs),
                "x floor beside it, best": self.ratio_to_floor(way),
            }


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40, help="tokens of each stream in a repeat (default: 40)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=500, help="steps of the second part (default: 500)")
    options = parser.parse_args()
    tokenizer = load_tokenizer(find_demo_model())
    costs = uvloop.run(measure_frames(tokenizer, options.connections, options.rounds, options.repeats))
    print(format_table(list(costs.rows())))
    print("\n" + format_table([uvloop.run(measure_pace(tokenizer, options.connections, options.steps))]))


async def measure_frames(
    tokenizer: Tokenizer, num_connections: int, num_rounds: int, num_repeats: int, *, with_plain: bool = True
) -> FrameCosts:
    """Time all ways in turn; floor and sink share their connections."""
    costs = FrameCosts()
    async with (
        streams(tokenizer, num_connections, step_time_s=None) as running,
        plain_streams(num_connections if with_plain else 1) as queues,
    ):
        ways = {"floor": write_prebuilt(running.transports), "sink": put_into_sinks(running.engine.sinks)}
        if with_plain:
            ways["plain"] = put_into_queues(queues)
        for _ in range(num_repeats):
            for way, push in ways.items():
                cost = await time_rounds(push, num_rounds)
                costs.by_way.setdefault(way, []).append(cost / num_connections * 1e6)
        if not all(transport.is_writable for transport in running.transports):
            raise RuntimeError("the clients did not keep up, so that less was sent than counted")
    return costs


async def time_rounds(push: Callable[[], None], num_rounds: int) -> float:
    """Return the CPU seconds of one round; the loop sends what ``push`` wrote while this task sleeps."""
    await asyncio.sleep(ROUND_S)
    start = time.thread_time()
    for _ in range(num_rounds):
        push()
        await asyncio.sleep(ROUND_S)
    return (time.thread_time() - start) / num_rounds


async def measure_pace(tokenizer: Tokenizer, num_connections: int, num_steps: int) -> dict[str, object]:
    """Run all streams on a device of 10 ms a step; report from the end of a step to the next launch."""
    async with streams(tokenizer, num_connections, step_time_s=ROUND_S) as running:
        metrics = running.engine.metrics
        metrics.step_turnaround = turnaround = ExactHistogram("exact", "", ())
        first, start = metrics.num_steps, time.thread_time()
        await until(lambda: metrics.num_steps >= first + num_steps)
        cpu = time.thread_time() - start
        return {
            "streams": num_connections,
            "steps": metrics.num_steps - first,
            "turn-around p50, ms": percentile(turnaround.values, 0.5) * 1000,
            "p99": percentile(turnaround.values, 0.99) * 1000,
            "loop CPU, us a token": cpu / (metrics.num_steps - first) / num_connections * 1e6,
        }


class ExactHistogram(Histogram):
    """Keeps every value."""

    def __init__(self, name: str, help: str, edges: Sequence[float]) -> None:
        super().__init__(name, help, edges)
        self.values: list[float] = []

    def observe(self, value: float) -> None:
        """Keep one value."""
        self.values.append(value)


class RecordingEngine(AsyncEngine):
    """Remembers the sinks that it was given."""

    sinks: list[Sink]

    def add(self, request: Request, sink: Sink) -> None:
        """Queue ``request``."""
        super().add(request, sink)
        self.sinks.append(sink)


@dataclass(slots=True)
class RunningStreams:
    """A server with one response under way on each connection."""

    engine: RecordingEngine
    transports: list[WebSocketProtocol]


@asynccontextmanager
async def streams(
    tokenizer: Tokenizer, num_connections: int, step_time_s: float | None
) -> AsyncIterator[RunningStreams]:
    """Serve a scripted device and start the responses; ``step_time_s`` None never completes a step."""
    limits = Limits(
        vocab_size=tokenizer.vocab_size,
        max_model_len=8192,
        max_num_seqs=num_connections,
        max_num_batched_tokens=8192,
        num_pages=num_connections * 256,
        page_size=32,
    )
    token_id = tokenizer.encode(TEXT)[0]
    runner = ScriptedRunner(limits, lambda history, position: token_id, step_time_s=step_time_s)
    engine = RecordingEngine(EngineConfig(served_model_name="scripted"), runner=runner, tokenizer=tokenizer)
    engine.sinks = []
    running = RunningStreams(engine, [])

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        running.transports.append(scope["extensions"][EXTENSION])
        await served(scope, receive, send)

    message = orjson.dumps(CREATE).decode().ljust(LONG_FRAME)
    async with engine:
        served = create_app(engine, Config())
        async with (
            serving(application, HttpProtocol, WebSocketProtocol) as port,
            crowd(port, "/v1/responses", num_connections, message),
        ):
            await until(lambda: len(engine.sinks) == num_connections)
            yield running


async def until(condition: Callable[[], bool]) -> None:
    """Wait, with a look now and then."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(ROUND_S)


@asynccontextmanager
async def serving(app: Any, http: type[asyncio.Protocol], ws: type[asyncio.Protocol]) -> AsyncIterator[int]:
    """Serve ``app`` on a free port and yield it."""
    config = uvicorn.Config(
        app, port=0, http=http, ws=ws, ws_per_message_deflate=False, lifespan="off", log_config=None, access_log=False
    )
    server = EmbeddedServer(config)
    task = asyncio.create_task(server.serve())
    await server.is_listening.wait()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


def put_into_sinks(sinks: Sequence[Sink]) -> Callable[[], None]:
    """Return what gives one token to every stream, as the step loop does."""
    output = RequestOutput("", TEXT, [1], 31, 1, 0)

    def push() -> None:
        for sink in sinks:
            sink.put(output)

    return push


def write_prebuilt(transports: Sequence[WebSocketProtocol]) -> Callable[[], None]:
    """Return what sends a ready frame of the same size to every connection."""
    payload = sample_event()
    frame = text_frame_header(len(payload)) + payload
    writes = [transport.transport.write for transport in transports]

    def push() -> None:
        for write in writes:
            write(frame)

    return push


def sample_event() -> bytes:
    """Return a delta event as a naive server would build it."""
    return orjson.dumps(
        {
            "type": "response.output_text.delta",
            "item_id": "msg_0123456789abcdef0123456789abcdef",
            "output_index": 0,
            "content_index": 0,
            "delta": TEXT,
            "logprobs": [],
            "sequence_number": 100,
        }
    )


@asynccontextmanager
async def plain_streams(num_connections: int) -> AsyncIterator[list["asyncio.Queue[str]"]]:
    """Serve connections with nothing but Starlette and uvicorn; what is put into a queue is sent, "" ends it."""
    queues: list[asyncio.Queue[str]] = []

    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        queue: asyncio.Queue[str] = asyncio.Queue()
        queues.append(queue)
        while await queue.get():
            await websocket.send_text(sample_event().decode())

    app = Starlette(routes=[WebSocketRoute("/", endpoint)])
    async with (
        serving(app, HttpToolsProtocol, WebSocketsSansIOProtocol) as port,
        crowd(port, "/", num_connections),
    ):
        await until(lambda: len(queues) == num_connections)
        yield queues
        for queue in queues:
            queue.put_nowait("")


def put_into_queues(queues: list["asyncio.Queue[str]"]) -> Callable[[], None]:
    """Return what gives one token to the task of every stream."""

    def push() -> None:
        for queue in queues:
            queue.put_nowait(TEXT)

    return push


if __name__ == "__main__":
    main()
