"""Thousands of requests at once, and huge bodies one after the other: probes and accepted requests are still served."""

import asyncio
import json
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from doubles_http import in_loop, live_server
from doubles_process import scripted, serving

NUM_REQUESTS = 2000  # the scripted server runs 64 and queues 1024
CHAT = "/v1/chat/completions"


class Probe(threading.Thread):
    """Asks for /health again and again on one connection, and keeps how long each answer took."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.seconds: list[float] = []
        self._connection = HTTPConnection("127.0.0.1", port, timeout=30)
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.005):
            started = time.monotonic()
            self._connection.request("GET", "/health")
            assert self._connection.getresponse().read() == b'{"status":"ok"}'
            self.seconds.append(time.monotonic() - started)

    def stop(self) -> None:
        self._is_over.set()
        self.join(30)
        self._connection.close()


@contextmanager
def probing(port: int) -> Iterator[Probe]:
    probe = Probe(port)
    probe.start()
    try:
        yield probe
    finally:
        probe.stop()


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


@pytest.fixture
def many_files() -> Iterator[None]:
    """Allow a socket for each request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * NUM_REQUESTS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def ask(port: int) -> tuple[int, float, bytes]:
    """Return the status of one raw request, how long its whole answer took, and the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "ignore_eos": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    started = time.monotonic()
    writer.write(head % len(body) + body)
    answer = await reader.read()
    seconds = time.monotonic() - started
    writer.close()
    return int(answer.split(maxsplit=2)[1]), seconds, answer


@pytest.mark.alone
@pytest.mark.usefixtures("many_files")
def test_thousands_of_requests_at_once(tmp_path: Path) -> None:
    with serving(scripted(), tmp_path / "log", is_watched=False) as server:
        server.wait_for("/ready", 200)

        async def ask_all() -> list[tuple[int, float, bytes]]:
            return await asyncio.gather(*(ask(server.port) for _ in range(NUM_REQUESTS)))

        with probing(server.port) as probe:
            answers = asyncio.run(ask_all())
        statuses = Counter(status for status, _, _ in answers)
        assert set(statuses) == {200, 503}, statuses
        assert 1024 <= statuses[200] < NUM_REQUESTS
        for status, _, answer in answers:
            assert status == 200 or b"retry-after: " in answer
        # 17 rounds of 64 requests, 8 steps of 10 ms each, are 1.4 s; the rest is for a busy machine.
        assert p99([seconds for status, seconds, _ in answers if status == 200]) < 8
        assert p99(probe.seconds) < 0.75
        assert server.status("/ready") == 200
        server.terminate()
        assert server.wait(10) == 0
        server.check_log()


@pytest.mark.alone
@in_loop
async def test_probes_are_answered_in_time_while_huge_bodies_come_in() -> None:
    text = json.dumps({"messages": [{"role": "user", "content": "lorem ipsum " * 400_000}]}).encode()
    tiny = b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 200_000) + b"]}"
    ids = json.dumps({"prompt": [5] * 10**6}).encode()
    large = text + b" " * (27 * 2**20)
    async with live_server() as live:

        def send_all() -> None:
            with httpx.Client(base_url=live.url, timeout=30) as client:
                for path, body in ((CHAT, text), (CHAT, tiny), ("/v1/completions", ids), (CHAT, large)):
                    assert client.post(path, content=body).status_code in (400, 413)

        def measure() -> float:
            with probing(live.address[1]) as probe:
                while len(probe.seconds) < 100:
                    send_all()
            return p99(probe.seconds)

        await asyncio.to_thread(send_all)
        best = min([await asyncio.to_thread(measure) for _ in range(3)])  # a busy machine delays everything
        assert best < 0.1
        await live.check_alive()
