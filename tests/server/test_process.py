"""The life of a serving process, seen from outside: loading, draining, signals, and failures of the engine."""

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles_process import ServingProcess, scripted, serving
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from aserve.config import ServerConfig
from aserve.errors import ConfigError
from aserve.server.serve import bind

ENDLESS = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "ignore_eos": True}
CHAT = "/v1/chat/completions"


class Call(threading.Thread):
    """One request in a thread; ``body`` and ``status`` are complete once it has ended."""

    def __init__(self, server: ServingProcess, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._url = server.url + CHAT
        self._fields = fields
        self.has_begun = threading.Event()
        self.status = 0
        self.body = ""
        self.error: httpx.TransportError | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._fields, timeout=60) as answer:
                self.status = answer.status_code
                for text in answer.iter_text():
                    self.body += text
                    self.has_begun.set()
        except httpx.TransportError as error:
            self.error = error


@contextmanager
def socket_to(server: ServingProcess) -> Iterator[ClientConnection]:
    with connect(server.url.replace("http", "ws") + "/v1/responses", proxy=None, compression=None) as connection:
        yield connection


@contextmanager
def half_sent(server: ServingProcess, *, num_bytes: int) -> Iterator[socket.socket]:
    """Begin a request whose body the server has begun to wait for."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(head % num_bytes)
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        yield sock


def wait_until_closed(server: ServingProcess, timeout_s: float = 10.0) -> None:
    """Wait until no connection is accepted any more: the signal has arrived."""
    deadline = time.monotonic() + timeout_s
    while server.status("/health") is not None:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.02)


def close_code(connection: ClientConnection) -> int | None:
    """Read to the end and return the close code."""
    try:
        while True:
            connection.recv(timeout=20)
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd else None


@pytest.mark.alone
def test_everything_open_is_ended_and_the_process_exits_with_0(tmp_path: Path) -> None:
    with serving(scripted("drain_timeout_s=2"), tmp_path / "log") as server, ExitStack() as stack:
        server.wait_for("/ready", 200)
        stream, plain = Call(server, stream=True, **ENDLESS), Call(server, **ENDLESS)
        idle, busy = (stack.enter_context(socket_to(server)) for _ in range(2))
        busy.send(json.dumps({"type": "response.create", "input": "hi", "ignore_eos": True}))
        busy.recv(timeout=10)
        server.wait_for_start(3)
        server.terminate()
        started = time.monotonic()
        time.sleep(0.5)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port))
        assert server.process.poll() is None
        assert close_code(idle) in (1001, 1012)
        assert close_code(busy) in (1001, 1012)
        assert server.wait(10) == 0
        assert 2 <= time.monotonic() - started < 4
        for call in (stream, plain):
            call.join(5)
        assert stream.body.endswith("data: [DONE]\n\n")
        assert '"error":{"message"' in stream.body
        assert '"finish_reason":"stop"' not in stream.body
        assert plain.status == 503
        assert json.loads(plain.body)["error"]["type"] == "service_unavailable_error"
        server.check_log()


def test_requests_that_end_in_time_are_answered_in_full(tmp_path: Path) -> None:
    with serving(scripted("drain_timeout_s=20"), tmp_path / "log") as server:
        server.wait_for("/ready", 200)
        short = {**ENDLESS, "max_tokens": 100}
        stream, plain = Call(server, stream=True, **short), Call(server, **short)
        server.wait_for_start(2)
        server.terminate()
        assert server.wait(10) == 0
        for call in (stream, plain):
            call.join(5)
        assert '"finish_reason":"length"' in stream.body
        assert stream.body.endswith("data: [DONE]\n\n")
        assert json.loads(plain.body)["usage"]["completion_tokens"] == 100
        server.check_log()


def test_new_requests_on_open_connections_are_refused_while_draining(tmp_path: Path) -> None:
    with serving(scripted("drain_timeout_s=3"), tmp_path / "log") as server:
        server.wait_for("/ready", 200)
        stream = Call(server, stream=True, **ENDLESS)
        with half_sent(server, num_bytes=40) as sock:
            assert stream.has_begun.wait(10)
            server.terminate()
            wait_until_closed(server)
            sock.sendall(b'{"prompt": "hi", "stream": true}'.ljust(40))
            answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: " in answer
        assert server.wait(10) == 0


def test_a_body_that_never_ends_gets_no_server_error(tmp_path: Path) -> None:
    with serving(scripted("drain_timeout_s=1"), tmp_path / "log") as server:
        server.wait_for("/ready", 200)
        with half_sent(server, num_bytes=500) as sock:
            sock.sendall(b"{")
            server.terminate()
            assert server.wait(10) == 0
            assert sock.recv(65536).startswith(b"HTTP/1.1 503 ")
        server.check_log()


def test_the_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    with serving(scripted("drain_timeout_s=60"), tmp_path / "log") as server:
        server.wait_for("/ready", 200)
        stream = Call(server, stream=True, **ENDLESS)
        assert stream.has_begun.wait(10)
        server.terminate()
        wait_until_closed(server)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.wait(10) == 128 + signal.SIGINT


def test_a_client_that_does_not_read_does_not_hold_the_process_up(tmp_path: Path) -> None:
    with serving(scripted("drain_timeout_s=1"), tmp_path / "log") as server, socket.socket() as sock:
        server.wait_for("/ready", 200)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        body = json.dumps({**ENDLESS, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 20}).encode()
        sock.sendall(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        time.sleep(2)
        server.terminate()
        assert server.wait(10) == 0
        server.check_log()


@pytest.mark.alone
def test_probes_answer_while_the_model_loads_and_a_signal_ends_the_load(tmp_path: Path) -> None:
    with serving(scripted("load_s=60"), tmp_path / "log") as server:
        server.wait_for("/health", 200)
        answer = httpx.get(server.url + "/ready")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        for path in ("/v1/models", CHAT):
            answer = httpx.request("GET" if path.endswith("models") else "POST", server.url + path, json=ENDLESS)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["type"] == "service_unavailable_error"
        assert server.status("/") == 200
        assert server.status("/version") == 200
        assert server.status("/metrics") == 200
        started = time.monotonic()
        server.terminate()
        assert server.wait(5) == 0
        assert time.monotonic() - started < 2
        server.check_log()


def test_the_first_request_after_ready_succeeds(tmp_path: Path) -> None:
    with serving(scripted("load_s=1"), tmp_path / "log") as server:
        server.wait_for("/ready", 200)
        answer = httpx.post(server.url + CHAT, json={**ENDLESS, "max_tokens": 3})
        assert answer.status_code == 200
        assert f"Chat: {server.url}/" in server.log
        server.process.send_signal(signal.SIGINT)
        assert server.wait(5) == 0
        server.check_log()


@pytest.mark.alone
def test_a_failed_step_ends_every_client_and_the_process(tmp_path: Path) -> None:
    with serving(scripted("fail_step=60"), tmp_path / "log") as server, ExitStack() as stack:
        server.wait_for("/ready", 200)
        stream, plain = Call(server, stream=True, **ENDLESS), Call(server, **ENDLESS)
        busy = stack.enter_context(socket_to(server))
        busy.send(json.dumps({"type": "response.create", "input": "hi", "ignore_eos": True}))
        events = []
        while not events or events[-1]["type"] not in ("response.failed", "error", "response.incomplete"):
            events.append(json.loads(busy.recv(timeout=10)))
        failed = time.monotonic()
        assert events[-1]["type"] == "response.failed"
        assert server.status("/ready") == 503
        for call in (stream, plain):
            call.join(1)
            assert not call.is_alive()
        assert '"error":{"message"' in stream.body
        assert stream.body.endswith("data: [DONE]\n\n")
        assert plain.status == 500
        assert server.wait(5) not in (0, None)
        assert time.monotonic() - failed < 5
        assert "never retrieved" not in server.log


def test_a_step_that_hangs_turns_readiness_and_then_health_off(tmp_path: Path) -> None:
    with serving(scripted("stall_step=20", "step_timeout_s=1", "drain_timeout_s=1"), tmp_path / "log") as server:
        server.wait_for("/ready", 200)
        stream = Call(server, stream=True, **ENDLESS)
        server.wait_for("/ready", 503, 10)
        refused = httpx.post(server.url + CHAT, json=ENDLESS)
        assert refused.status_code == 503
        assert re.fullmatch(r"a step has not completed for \d+ s", refused.json()["error"]["message"])
        server.wait_for("/health", 503, 10)
        server.terminate()
        assert server.wait(10) == 0
        stream.join(5)
        assert stream.body.endswith("data: [DONE]\n\n")


def test_a_taken_port_is_said_plainly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
            bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match=r"no\.such\.host"):
        bind(ServerConfig(host="no.such.host.invalid", port=port))


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let every host name stand for the given addresses."""

    def to(*found: tuple[int, str]) -> None:
        def answer(host: str, port: int, **hints: Any) -> list[Any]:
            return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in found]

        monkeypatch.setattr(socket, "getaddrinfo", answer)

    return to


ABSENT = (socket.AF_INET, "192.0.2.1")  # of a block that no machine has (RFC 5737)
UNKNOWN_FAMILY = (socket.AF_IPX, "127.0.0.1")
PRESENT = (socket.AF_INET, "127.0.0.1")


@pytest.mark.parametrize("absent", [ABSENT, UNKNOWN_FAMILY])
def test_an_address_that_is_not_there_is_left_out(resolve: Callable[..., None], absent: tuple[int, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for found in ((absent, PRESENT), (PRESENT, absent)):
        resolve(*found)
        for wanted in (0, port):
            (listener,) = bind(ServerConfig(host="localhost", port=wanted))
            with listener:
                assert listener.getsockname()[0] == "127.0.0.1"
    resolve(absent)
    with pytest.raises(ConfigError, match="cannot listen on localhost"):
        bind(ServerConfig(host="localhost", port=port))


def test_a_taken_address_is_not_left_out(resolve: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        resolve(PRESENT, (socket.AF_INET, "127.0.0.2"))
        with pytest.raises(ConfigError, match="cannot listen on localhost"):
            bind(ServerConfig(host="localhost", port=port))
    with socket.create_server(("127.0.0.1", port)):  # and nothing was left listening
        pass
