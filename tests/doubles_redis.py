"""A Redis for tests: a real server where one is installed, else fakeredis behind a socket; and one that goes silent."""

import shutil
import socket as sockets
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from doubles_port import reserve_port
from fakeredis import TcpFakeServer
from redis import Redis
from redis.exceptions import ConnectionError as LostError


class FakeRedisServer(TcpFakeServer):
    """fakeredis behind a socket, whose connections end with it."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int) -> None:
        self._connections: list[sockets.socket] = []
        super().__init__(("127.0.0.1", port))

    def get_request(self) -> tuple[sockets.socket, object]:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(sockets.SHUT_RDWR)


class RedisServer:
    """A server of its own that can be stopped and started again on the same port; it forgets everything then."""

    def __init__(self, folder: Path) -> None:
        self._reserved = reserve_port()
        self.port = int(self._reserved.getsockname()[1])
        self._folder = folder
        self._program = shutil.which("redis-server")
        self._process: subprocess.Popen[bytes] | None = None
        self._double: FakeRedisServer | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/3"

    def start(self) -> None:
        if self._program is None:
            self._double = FakeRedisServer(self.port)
            threading.Thread(target=self._double.serve_forever, args=(0.01,), daemon=True).start()
        else:
            options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
            self._process = subprocess.Popen([self._program, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        with Redis(port=self.port) as client:
            while True:
                with suppress(LostError):
                    if client.ping():
                        return
                assert time.monotonic() < deadline, "Redis does not start"
                time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._double is not None:
            self._double.stop()
        self._process = self._double = None

    def close(self) -> None:
        """Stop for good."""
        self.stop()
        self._reserved.close()

    def clear(self) -> None:
        with Redis(port=self.port) as client:
            client.flushall()


class SilentProxy:
    """Stands before a Redis; while ``is_silent`` it takes everything and passes nothing on."""

    def __init__(self, port: int) -> None:
        self.is_silent = False
        self._target = port
        self._closing = ExitStack()
        self._listener = self._closing.enter_context(sockets.create_server(("127.0.0.1", 0)))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/3?socket_timeout=1"

    def close(self) -> None:
        self._closing.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = sockets.create_connection(("127.0.0.1", self._target))
                for one in (near, far):
                    self._closing.callback(one.close)
                for ways in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ways, daemon=True).start()

    def _pass_on(self, source: sockets.socket, sink: sockets.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self.is_silent:
                    sink.sendall(data)
            sink.shutdown(sockets.SHUT_WR)
