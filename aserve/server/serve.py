"""The life of a serving process: listen, load, serve, drain, exit; signals and failures decide when.

The port is bound and answers probes before the weights load. uvicorn runs in the engine's own loop.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn

from aserve.config import Config, ServerConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.errors import CapacityError, ConfigError
from aserve.server.app import create_app
from aserve.server.http_protocol import HttpProtocol
from aserve.server.loop_lag import LoopLag
from aserve.server.state import ServerState
from aserve.server.ws_protocol import WebSocketProtocol

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # of an idle connection: longer than the minute for which most balancers reuse one
DATE_INTERVAL_S = 1.0
CLOSE_POLL_S = 0.01
GRACE_S = 1.0  # for the last frames to leave when the server closes
ABSENT_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
FAILURE_POLL_S = 0.2
FAILURE_GRACE_S = 1.0  # probes and clients learn of a failure before the process exits


class EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handling, in a loop that is not its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()
        self._is_stopping = asyncio.Event()

    def stop(self) -> None:
        """Close the connections and let ``serve`` return."""
        self.should_exit = True
        self._is_stopping.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start and tell."""
        await super().startup(sockets)
        self.is_listening.set()

    async def main_loop(self) -> None:
        """Keep the date of the answers right until ``stop``, and then go at once."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), DATE_INTERVAL_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close listeners and connections; what is still being answered has GRACE_S to leave."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        state = self.server_state
        for connection in tuple(state.connections):
            connection.shutdown()
        for _ in range(round(GRACE_S / CLOSE_POLL_S)):
            await asyncio.sleep(CLOSE_POLL_S)
            if not state.connections and not state.tasks:
                break
        for task in tuple(state.tasks):
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to ``serve``."""
        yield


class RunningServer:
    """A server that listens. ``url`` has no slash at its end."""

    def __init__(self, server: EmbeddedServer, state: ServerState, url: str, loop_lag: LoopLag) -> None:
        self.url = url
        self.state = state
        self.loop_lag = loop_lag
        self._server = server

    def begin_drain(self) -> None:
        """Accept no more connections and no more requests; idle connections close."""
        for listener in self._server.servers:
            listener.close()
        self.state.begin_drain()
        for connection in tuple(self._server.server_state.connections):
            if isinstance(connection, HttpProtocol):
                connection.shutdown()


@contextlib.asynccontextmanager
async def running_server(config: Config, engine: AsyncEngine) -> AsyncIterator[RunningServer]:
    """Serve ``engine``, which the caller starts and stops, until the block ends; open streams then end with an error.

    Raises ConfigError if the address cannot be had.
    """
    listeners = bind(config.server)
    state = ServerState(engine, config)
    server = EmbeddedServer(_uvicorn_config(config, create_app(engine, config, state)))
    loop_lag = LoopLag(engine.metrics)
    serving = asyncio.create_task(server.serve(sockets=listeners), name="aserve-server")
    await server.is_listening.wait()
    loop_lag.start()
    try:
        yield RunningServer(server, state, _url(config.server, listeners[0]), loop_lag)
    finally:
        loop_lag.stop()
        state.is_draining = True
        state.shut_down(CapacityError("the server is shutting down"))
        server.stop()
        await serving
        await state.close()


async def serve(config: Config, on_ready: Callable[[str], None], engine: AsyncEngine | None = None) -> int:
    """Serve until a signal or a failure ends it; returns the exit code. ``on_ready`` gets the address.

    ``engine`` is one that has not been started yet; None makes it from ``config``. Raises ConfigError if the address,
    the model or the machine does not allow it.
    """
    engine = engine or AsyncEngine(config.engine)
    stop = _watch_signals()
    async with running_server(config, engine) as server:
        logger.info("listening on %s; the model is loading", server.url)
        starting = asyncio.create_task(engine.start(), name="aserve-start")
        if not await _is_first(starting, stop):
            starting.cancel()
            logger.info("stopped while loading")
            return 0
        await starting
        on_ready(server.url)
        while not stop.is_set() and engine.failure is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), FAILURE_POLL_S)
        if engine.failure is not None:
            logger.critical("the engine has failed: %s", engine.failure)
            await asyncio.sleep(FAILURE_GRACE_S)
            return 1
        logger.info("draining for at most %g s", config.server.drain_timeout_s)
        server.begin_drain()
        if not await engine.drain(config.server.drain_timeout_s):
            logger.warning("requests were still open after the drain time and were ended")
    await engine.stop()
    return 0


def run_server(config: Config, engine: AsyncEngine | None = None) -> int:
    """Serve in an event loop of its own; returns the exit code."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(serve(config, lambda url: print(f"aserve is ready. Chat: {url}/", flush=True), engine))
    if any(thread.daemon for thread in threading.enumerate()):
        # A thread in native code (a load that was interrupted, a step that hangs) cannot be stopped, and crashes when
        # the interpreter goes first.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


def bind(config: ServerConfig) -> list[socket.socket]:
    """Return listening sockets, one for each address of ``host``; one only if the port is to be a free one.

    An address that this machine does not have (``localhost`` often names ::1 where there is no IPv6) is left out,
    unless there is no other.
    """
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    try:
        found = socket.getaddrinfo(config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            try:
                listeners.append(socket.create_server(address[:2], family=family, backlog=2048))
            except OSError as error:
                if error.errno not in ABSENT_ADDRESS:
                    raise
                absent = error
            if listeners and not config.port:
                break
        if absent is not None and not listeners:
            raise absent
    except OSError as error:
        for listener in listeners:
            listener.close()
        reason = "the port is in use; --port names another" if error.errno == errno.EADDRINUSE else str(error)
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}") from error
    return listeners


def _uvicorn_config(config: Config, app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=HttpProtocol,
        ws=WebSocketProtocol,
        ws_max_size=int(config.server.max_frame_mib * 2**20),
        ws_per_message_deflate=config.server.ws_deflate,
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def _url(config: ServerConfig, listener: socket.socket) -> str:
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{listener.getsockname()[1]}"


def _watch_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second ends the process at once."""
    stop = asyncio.Event()

    def note(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, note, number)
    return stop


async def _is_first(task: "asyncio.Task[None]", stop: asyncio.Event) -> bool:
    """Wait for either; True if ``task`` ended before ``stop`` was set."""
    waiting = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return task.done()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
