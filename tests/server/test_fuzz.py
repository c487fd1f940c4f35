"""Malformed bodies and frames by the thousand: each gets the right error, connections keep their rules, others live on.

The clients run in threads, so that their work is not on the server's loop.
"""

import asyncio
import base64
import http.client
import itertools
import json
import os
import random
import socket
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop
from doubles_fuzz import BODIES, FRAMES, TEXT, Case, broken_frames, cases, masked
from doubles_http import EOS, LIMITS, Live, live_server
from doubles_socket import TERMINAL, check_event
from websockets.sync.client import ClientConnection, connect

SHORT = type(LIMITS)(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"max_model_len": 512})
FRAME_MIB = 4.0
NOT_JSON = ("invalid_json", "body_too_complex", "body_too_large")
COMPANIONS = {  # changed field -> others that an error may name, since the two are checked together
    "logprobs": {"top_logprobs"}, "n": {"prompt"}, "messages": {"tools", "tool_choice"}, "tools": {"tool_choice"},
    "tool_choice": {"tools"}, "prompt": {"echo", "messages"}, "input": {"previous_response_id"},
    "add_special_tokens": set(), "max_output_tokens": {"min_tokens"}, "max_tokens": {"min_tokens"},
}  # fmt: skip


def one_word(tokens: Sequence[int], position: int) -> int:
    """Say one token and end."""
    return EOS if tokens[position - 1] == 300 else 300


def post(connection: http.client.HTTPConnection, path: str, payload: bytes) -> tuple[int, str, bytes]:
    connection.request("POST", path, body=payload, headers={"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.headers["content-type"].partition(";")[0], answer.read()


def fuzz_bodies(live: Live, path: str, seed: int, number: int) -> Counter[int]:
    """Send ``number`` malformed bodies and check each answer; return how often each status came."""
    connection = http.client.HTTPConnection(*live.address, timeout=60)
    seen: Counter[int] = Counter()
    for case in itertools.islice(cases(seed, [BODIES[path]]), number):
        status, kind, body = post(connection, path, case.payload)
        check_answer(path, case, status, kind, body)
        seen[status] += 1
    connection.close()
    return seen


def check_answer(path: str, case: Case, status: int, kind: str, body: bytes) -> None:
    shown = (path, case.field, case.payload[:3000], status, body[:500])
    if not case.is_object:
        assert status in (400, 413), shown
    assert status in (200, 400, 404, 413), shown
    if kind == "text/event-stream":
        assert body.endswith(b"data: [DONE]\n\n") or b"event: " in body, shown
        return
    answer = json.loads(body, parse_constant=lambda name: pytest.fail(name))
    if status == 200:
        assert "error" not in answer or answer["error"] is None, shown
        return
    error = answer["error"]
    assert error["message"], shown
    if path == "/v1/messages":
        return  # its errors name no field
    assert set(error) == {"message", "type", "param", "code"}, shown
    assert error["type"] == "invalid_request_error", shown
    assert (error["code"] in NOT_JSON) == (not case.is_object), shown
    if case.is_object and case.field is not None and error["param"] is not None:
        root = error["param"].partition(".")[0].partition("[")[0]
        if error["code"] == "context_length_exceeded":
            assert root in ("messages", "prompt", "input", "tokens"), shown
            return
        assert root == case.field or root in COMPANIONS.get(case.field, ()), shown


def fuzz_frames(live: Live, seed: int, number: int) -> Counter[str]:
    """Send malformed messages on sockets that have to stay open, and a good one after every ten.

    What is no JSON object is told so, once each.
    """
    seen: Counter[str] = Counter()
    num_not_json = 0
    messages = cases(seed, FRAMES)
    chance = random.Random(seed)
    url = live.url.replace("http", "ws") + "/v1/responses"
    for start in range(0, number, 200):
        with connect(url, proxy=None, max_size=None, compression=None) as client:
            for _ in range(min(200, number - start) // 10):
                for case in itertools.islice(messages, 10):
                    text = case.payload.decode(errors="ignore")  # what is no UTF-8 breaks a rule of the protocol
                    num_not_json += not Case(text.encode()).is_object
                    send_whole_or_in_pieces(client, text, chance)
                check_alive(client, seen)
    assert sum(seen[code] for code in NOT_JSON) == num_not_json
    return seen


def send_whole_or_in_pieces(client: ClientConnection, text: str, chance: random.Random) -> None:
    if len(text) > 1 and chance.random() < 0.1:
        middle = chance.randrange(len(text))
        client.send([text[:middle], text[middle:]])
    else:
        client.send(text)


def check_alive(client: ClientConnection, seen: Counter[str]) -> None:
    """Have a good request answered behind whatever still runs; every event on the way is of an official type."""
    client.send(
        json.dumps({"type": "response.create", "input": "hi", "max_output_tokens": 2, "metadata": {"my": "own"}})
    )
    while True:
        text = client.recv(timeout=60)
        assert isinstance(text, str)
        event: dict[str, Any] = json.loads(text)
        if event["type"] == "response.steer.failed":
            event["steer"]["input"] = ""  # it hands back what it got, which may be wrong
        check_event(event)
        seen[event["type"]] += 1
        if event["type"] == "error":
            assert event["status"] in (400, 404, 429), event
            assert event["error"]["message"]
            seen[event["error"]["code"]] += 1
        elif event["type"] in TERMINAL:
            assert event["type"] != "response.failed", event
            if event["response"]["metadata"] == {"my": "own"} and "stream_id" not in event:
                return


def fuzz_protocol(live: Live, seed: int, number: int) -> Counter[int]:
    """Break the rules of WebSockets ``number`` times; each time the server closes with the code for it."""
    chance = random.Random(seed)
    seen: Counter[int] = Counter()
    for _ in range(number):
        data, code = broken_frames(chance)
        answer = exchange(live.address, data)
        assert answer[0] == 0x88, (data[:200], code, answer[:200])
        assert int.from_bytes(answer[2:4], "big") == code, (data[:200], code, answer[:200])
        seen[code] += 1
    return seen


def exchange(address: tuple[str, int], data: bytes) -> bytes:
    """Open a WebSocket, send ``data`` after a good message, and return the frame after that one's error event."""
    key = base64.b64encode(os.urandom(16)).decode()
    request = (
        "GET /v1/responses HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    )
    with socket.create_connection(address, timeout=60) as connection, connection.makefile("rb") as reader:
        connection.sendall(request.encode())
        assert b" 101 " in reader.readline()
        while reader.readline() != b"\r\n":
            pass
        connection.sendall(masked(TEXT, b"{}"))
        first = reader.read(2)
        assert first[0] == TEXT
        assert b"unknown_event_type" in reader.read(
            int.from_bytes(reader.read(2), "big") if first[1] == 126 else first[1]
        )
        connection.sendall(data)
        head = reader.read(2)
        return head + reader.read(head[1])


async def fuzz(number: int) -> None:
    """Send ``number`` malformed bodies, messages and frames from five threads, and check what they left behind."""
    async with live_server(one_word, limits=SHORT, max_frame_mib=FRAME_MIB, max_body_mib=3.0) as live:
        plain = (await live.chat(max_tokens=4, temperature=0)).json()["choices"]
        live.loop_lag._samples = deque()  # of the whole run, not of the last minute
        share = number // 20
        bodies = [
            asyncio.to_thread(fuzz_bodies, live, path, seed, share * weight)
            for seed, (path, weight) in enumerate(zip(BODIES, (4, 2, 3, 2, 1, 1), strict=True))
        ]
        statuses = await asyncio.gather(*bodies[:3])
        statuses += await asyncio.gather(*bodies[3:])
        events, codes = await asyncio.gather(
            asyncio.to_thread(fuzz_frames, live, 11, share * 5), asyncio.to_thread(fuzz_protocol, live, 12, share * 2)
        )
        total = sum(statuses, Counter())
        print(
            f"{number} cases: {dict(total)} {dict(events)} {dict(codes)} lag p99 {live.loop_lag.quantile(0.99):.4f} s"
        )
        assert total[200] > number // 50
        assert total[400] > number // 4
        assert events["error"] > number // 10
        assert set(codes) == {1002, 1003, 1007, 1009}
        await live.until_idle(20)
        assert (await live.chat(max_tokens=4, temperature=0)).json()["choices"] == plain
        assert live.engine.is_alive
        if number >= 20_000:
            assert live.loop_lag.quantile(0.99) < 0.1


def test_a_thousand_malformed_requests() -> None:
    uvloop.run(fuzz(1000))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_thousand_malformed_requests() -> None:
    uvloop.run(fuzz(20_000))
