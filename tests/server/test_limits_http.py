"""Small bodies that ask for huge work, and huge bodies: refused in time, while everybody else is served in time."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from doubles_engine import until
from doubles_http import (
    CUE,
    LIMITS,
    Live,
    in_loop,
    live_server,
    once_set,
    one_stream,
    peak_rss_bytes,
    raw_post,
    rss_bytes,
)

from aserve.server import http_protocol

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(content: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": [5, *CUE], **fields}).encode()


def cheap(tokens: Any, position: int) -> int:
    return 300 + position % 4000


HUGE = {
    "n": (COMPLETIONS, completion(n=10**6)),
    "best_of": (COMPLETIONS, completion(best_of=10**6)),
    "prompts": (COMPLETIONS, completion(prompt=["a"] * 10**5)),
    "stops": (COMPLETIONS, completion(stop=["a"] * 5 * 10**5)),
    "one stop": (COMPLETIONS, completion(stop="a" * 10**7)),
    "tools": (CHAT, chat("a")[:-1] + b',"tools":[' + b",".join([b'{"type":"function"}'] * 10**5) + b"]}"),
    "depth": (CHAT, b'{"messages":' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
    "deep text": (CHAT, b'{"messages":[{"role":"user","content":' + b"[" * 1500 + b"]" * 1500 + b"}]}"),
    "max_tokens": (COMPLETIONS, completion(max_tokens=2**31)),
    "bias": (COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(10**5)})),
    "lists": (CHAT, b'{"messages":[' + b"[]," * (5 * 2**20) + b"[]]}"),
    "1 MB text": (CHAT, chat("lorem ipsum " * 90_000)),
    "4 MB prompt": (COMPLETIONS, completion(prompt="lorem ipsum " * 350_000)),
    "5 MB word": (CHAT, chat("a" * 5 * 2**20)),
    "16 MiB text": (CHAT, chat("ř" * (8 * 2**20 - 100)).decode("unicode_escape").encode()),
    "27 MB text": (CHAT, chat("lorem ipsum " * 2_250_000)),
    "tiny messages": (CHAT, b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 200_000) + b"]}"),
    "ids": (COMPLETIONS, completion(prompt=[5] * 10**6)),
    "few ids": (COMPLETIONS, completion(prompt=[5] * 400_000)),
}


@dataclass
class Disturbance:
    """What one request did to everybody else."""

    lag_s: float
    gap_s: float
    seconds: float


async def measure(live: Live, path: str, body: bytes, times: list[float]) -> Disturbance:
    """Send ``body`` from a thread, so that the client's own work is not the server's."""
    num_before = len(times)
    live.loop_lag.reset()
    started = time.monotonic()
    answer = await asyncio.to_thread(httpx.post, live.url + path, content=body, timeout=30)
    seconds = time.monotonic() - started
    assert answer.status_code == (413 if len(body) > 16 * 2**20 else 400), answer.text[:200]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[num_before:])]
    return Disturbance(live.loop_lag.quantile(1), max(gaps, default=0), seconds)


@pytest.mark.alone
@pytest.mark.parametrize("name", HUGE)
@in_loop
async def test_huge_work_is_refused_while_others_are_served(name: str) -> None:
    path, body = HUGE[name]
    async with live_server(cheap, step_time_s=0.01) as live, one_stream(live) as times:
        for attempt in range(4):  # a busy machine delays everything now and then
            before = rss_bytes()
            seen = await measure(live, path, body, times)
            assert peak_rss_bytes() - before < 200 * 2**20
            if attempt and seen.lag_s < 0.1 and seen.gap_s < 0.2 and seen.seconds < 1.0:
                break
        else:
            pytest.fail(f"{name}: {seen}")
        assert (await live.http.get("/health")).status_code == 200


@in_loop
async def test_a_body_is_measured_as_it_comes_in() -> None:
    async with live_server(max_body_mib=1.0) as live:

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(32):
                yield b" " * 2**16

        answer = await live.http.post(CHAT, content=pieces())
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        fits = chat("a")
        assert (await live.http.post(CHAT, content=fits + b" " * (2**20 - len(fits)))).status_code == 200
        assert (await live.http.post(CHAT, content=fits + b" " * (2**20 - len(fits) + 1))).status_code == 413
        await live.check_alive()


@in_loop
async def test_a_body_that_is_not_wanted_is_not_asked_for() -> None:
    async with live_server(max_body_mib=1.0) as live:
        reader, writer = await asyncio.open_connection(*live.address)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2000000\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 5)  # to the end: the connection is closed
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer
        writer.close()


@in_loop
async def test_a_client_that_never_stops_sending_is_cut_off() -> None:
    async with live_server(max_body_mib=1.0) as live:
        reader, writer = await asyncio.open_connection(*live.address)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")

        async def send() -> None:
            for _ in range(300):
                writer.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")
                await writer.drain()

        status, sent = await asyncio.gather(reader.readline(), send(), return_exceptions=True)
        assert b" 413 " in status  # type: ignore[operator]
        assert isinstance(sent, ConnectionError)
        writer.close()


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX-A: ", b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 50])
@in_loop
async def test_a_head_without_end_is_cut_off(start: bytes) -> None:
    async with live_server() as live:
        reader, writer = await asyncio.open_connection(*live.address)
        writer.write(start)
        try:
            for _ in range(100):
                writer.write(b"a" * 10_000)
                await writer.drain()
        except ConnectionError:
            pass
        else:
            assert b" 400 " in await reader.readline()
        writer.close()
        await live.check_alive()


@in_loop
async def test_a_head_that_never_comes_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    async with live_server(cheap, step_time_s=0.02) as live, one_stream(live) as times:
        for sent in (b"", b"GET / HT", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET"):
            reader, writer = await asyncio.open_connection(*live.address)
            writer.write(sent)
            answer = await asyncio.wait_for(asyncio.gather(reader.read(), return_exceptions=True), 5)
            assert isinstance(answer[0], ConnectionError) or answer[0].count(b"HTTP/1.1 200") == sent.count(b"health")
            writer.close()
        seen = len(times)
        await until(lambda: len(times) > seen)  # a request that is being answered has no such deadline


@pytest.mark.alone
@in_loop
async def test_probes_are_answered_beside_256_streams() -> None:
    limits = type(LIMITS)(
        **{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"max_num_seqs": 256, "num_pages": 256 * 520}
    )
    async with live_server(cheap, limits=limits, step_time_s=0.02) as live, AsyncExitStack() as stack:
        fields = {"prompt": [5, *CUE], "max_tokens": 8000, "stream": True}
        readers = []
        for _ in range(256):
            reader, _ = await stack.enter_async_context(raw_post(live, COMPLETIONS, fields))
            readers.append(asyncio.create_task(drain(reader)))
        await until(lambda: live.engine.stats().num_running == 256, 30)

        def probe() -> list[float]:
            times = []
            with httpx.Client(base_url=live.url) as client:
                for _ in range(100):
                    started = time.monotonic()
                    assert client.get("/health").status_code == 200
                    times.append(time.monotonic() - started)
            return sorted(times)

        assert (await asyncio.to_thread(probe))[98] < 0.25
        for task in readers:
            task.cancel()


async def drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass


@in_loop
async def test_requests_past_the_queue_are_refused_with_retry_after() -> None:
    limits = type(LIMITS)(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"max_num_seqs": 2})
    all_are_there = threading.Event()
    script, engine = once_set(all_are_there, cheap), {"max_queued_requests": 10}
    async with live_server(script, limits=limits, step_time_s=0.002, engine=engine) as live:
        fields = ({"max_tokens": 50, "stream": i % 2 == 0} for i in range(60))
        asked = [asyncio.create_task(live.complete([5, *CUE], **one)) for one in fields]
        await until(lambda: sum(answer.done() for answer in asked) >= 48, 30)
        all_are_there.set()
        answers = await asyncio.gather(*asked)
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 48 <= len(refused) <= 50  # the device's two start only when a step is planned
        for answer in refused:
            assert answer.status_code in (429, 503)
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] in ("rate_limit_error", "service_unavailable_error")
        await live.until_idle()
        for stream in (False, True):
            batch = await live.complete(["a"] * 13, max_tokens=8000, stream=stream)
            assert batch.status_code == 503
            await live.until_idle()  # none of the thirteen runs on
        await live.check_alive()


BAD_SAMPLING = [
    {"logit_bias": {"49152": 5}}, {"logit_bias": {"-1": 5}}, {"logit_bias": {"x": 1}}, {"stop_token_ids": [49152]},
    {"stop_token_ids": [-1]}, {"top_k": 0}, {"top_k": -1}, {"top_k": 49152}, {"top_k": 10**9}, {"top_k": 2**63},
    {"top_p": 0}, {"top_p": 1}, {"top_p": 1.0001}, {"top_p": -0.1}, {"min_p": -1}, {"min_p": 0}, {"min_p": 1},
    {"min_p": 1.1}, {"logprobs": 21}, {"logprobs": 10**6}, {"logprobs": True}, {"seed": 0}, {"seed": -1},
    {"seed": 2**63 - 1}, {"seed": 2**64},
]  # fmt: skip


@in_loop
async def test_extreme_sampling_fields_disturb_no_neighbour() -> None:
    async with live_server(cheap) as live:
        alone = (await live.complete([5, *CUE], max_tokens=40, temperature=0)).json()["choices"]
        neighbour = asyncio.create_task(live.complete([5, *CUE], max_tokens=40, temperature=0))
        for fields in BAD_SAMPLING:
            assert (await live.complete([6, *CUE], max_tokens=2, **fields)).status_code in (200, 400)
        raw = completion(max_tokens=2)[:-1] + b',"logit_bias":{"5":NaN}}'
        assert (await live.http.post(COMPLETIONS, content=raw)).status_code == 400
        assert (await neighbour).json()["choices"] == alone
        await live.check_alive()


@pytest.mark.parametrize(
    ("path", "body", "token"),
    [(COMPLETIONS, completion(), b'"text":"'), (CHAT, chat("hi"), b'"delta":{"content":"')],
    ids=["completions", "chat"],
)
@in_loop
async def test_silence_is_filled_with_comments_before_and_between_tokens(path: str, body: bytes, token: bytes) -> None:
    may_speak = threading.Semaphore(0)

    def script(tokens: Any, position: int) -> int:
        assert may_speak.acquire(timeout=30)
        return cheap(tokens, position)

    async with (
        live_server(script, keep_alive_s=0.1) as live,
        raw_post(live, path, {**json.loads(body), "stream": True}) as (reader, _),
    ):
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        for _ in range(3):
            silence = [await reader.readuntil(b": keep-alive\n\n") for _ in range(2)]
            assert token not in b"".join(silence)
            may_speak.release()
            await reader.readuntil(token)
        may_speak.release(100)
    async with live_server(cheap, step_time_s=0.3, keep_alive_s=0.0) as live:
        assert ": " not in (await live.complete(max_tokens=2, stream=True)).text.replace("data: ", "")


def test_no_test_leaves_a_thread_behind() -> None:
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("scripted")]
