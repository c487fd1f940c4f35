"""Structured output over HTTP: what cannot be enforced is refused by name; compiling holds up nobody (B39, B41)."""

import asyncio
import http.client
import itertools
import json
import time
from typing import Any

import httpx
import psutil
import pytest
import uvloop
from doubles_http import Live, in_loop, live_server, one_stream
from doubles_structured import nested_choice
from doubles_tuning import make_engine
from jsonschema import Draft202012Validator
from openai.types.chat import ChatCompletion

from aserve.config import Config, EngineConfig, ServerConfig
from aserve.server.serve import running_server

GOOD = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BAD_SCHEMAS: list[Any] = [
    {"type": "frob"}, {"$ref": "#/nope"}, {"$ref": "#"}, True, [], "", {"type": "integer", "minimum": 5, "maximum": 1},
    {"enum": []}, {"type": "array", "uniqueItems": True}, {"type": "string", "pattern": "["}, 5,
]  # fmt: skip


def asking(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}}


def calling(parameters: Any) -> dict[str, Any]:
    return {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    *((asking(schema), "response_format") for schema in [*BAD_SCHEMAS, None]),
    *(({"guided_json": schema}, "guided_json") for schema in BAD_SCHEMAS),
    *((calling(parameters), "tools") for parameters in BAD_SCHEMAS if parameters != {"$ref": "#"}),
    *(({"regex": text}, "regex") for text in ("[", "(?=a)b", "", 5, r"(a)\1")),
    *(({"ebnf": text}, "ebnf") for text in ("start: nothing", "", "start: (", [])),
    *(({"guided_choice": value}, "guided_choice") for value in ([], "a", [""], [5])),
    ({"regex": "a", "ebnf": 'start: "a"'}, "ebnf"),
    ({"structured_outputs": {"frob": 1}}, "structured_outputs"),
]


@in_loop
async def test_what_cannot_be_enforced_is_refused_by_name_before_the_200() -> None:
    async with live_server() as live:
        for (fields, param), stream in itertools.product(REFUSED, (False, True)):
            answer = await live.chat(stream=stream, max_tokens=3, **fields)
            assert answer.status_code == 400, (fields, answer.text[:300])
            assert answer.json()["error"]["param"].partition(".")[0].partition("[")[0] == param, (fields, answer.text)
        assert live.engine.metrics.num_steps == 0
        await live.check_alive()


@pytest.mark.timeout(200)
@in_loop
async def test_a_bad_request_beside_a_good_one_leaves_it_valid_and_its_logprobs_finite() -> None:
    async with make_engine(EngineConfig()) as engine:
        config = Config(engine=engine.config, server=ServerConfig(port=0))
        async with (
            running_server(config, engine) as server,
            httpx.AsyncClient(base_url=server.url, timeout=90) as client,
        ):
            turn = {"messages": [{"role": "user", "content": "Who wrote the first program?"}], "max_tokens": 60}
            bodies = [{**turn, **asking(GOOD), "logprobs": True, "top_logprobs": 5}]
            bodies += [{**turn, **asking(schema)} for schema in BAD_SCHEMAS]
            good, *bad = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
    assert {answer.status_code for answer in bad} == {400}
    body = json.loads(good.text, parse_constant=lambda name: pytest.fail(name))
    choice = ChatCompletion.model_validate(body, strict=True).choices[0]
    assert choice.message.content is not None
    Draft202012Validator(GOOD).validate(json.loads(choice.message.content))
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == body["usage"]["completion_tokens"]
    for entry in choice.logprobs.content:
        assert all(-9999 <= one.logprob <= 0 for one in [entry, *entry.top_logprobs])
        assert max(entry.top_logprobs, key=lambda one: one.logprob) == entry.top_logprobs[0]


def slow(place: int) -> dict[str, Any]:
    """Return fields that ask for a grammar which takes long, another one for each ``place``."""
    kinds: list[dict[str, Any]] = [
        asking({"title": f"{place}", **nested_choice(10)}),
        asking({"enum": [f"word {place} {i} {'x' * 8}" for i in range(4000)]}),
        {"regex": "(a|aa)+" * (40 + place) + "b"},
        {"regex": f".{{1,{4000 + place}}}"},
        {"regex": "[a-z]?" * (9000 + place) + "x"},
        {"ebnf": "start: " + '"a"?' * (10_000 + place)},
    ]
    return kinds[place % len(kinds)]


def post(live: Live, fields: dict[str, Any]) -> tuple[int, float]:
    """Return status and seconds; the standard library's client costs the server's process least."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields})
    connection = http.client.HTTPConnection(*live.address, timeout=120)
    started = time.monotonic()
    connection.request("POST", "/v1/chat/completions", body)
    status = connection.getresponse().status
    connection.close()
    return status, time.monotonic() - started


def probe(live: Live, until_done: "asyncio.Future[Any]") -> list[float]:
    times = []
    connection = http.client.HTTPConnection(*live.address, timeout=120)
    while not until_done.done():
        started = time.monotonic()
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        times.append(time.monotonic() - started)
        time.sleep(0.02)
    connection.close()
    return sorted(times)


def cpu_s() -> float:
    """Return the CPU time of this process and of those that it has started."""
    process = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])


async def disturb(live: Live, requests: list[dict[str, Any]], times: list[float]) -> tuple[float, float, float]:
    """Send ``requests`` at once; return the loop's largest lag, the stream's largest gap and the slowest probe."""
    num_before = len(times)
    live.loop_lag.reset()
    answers = asyncio.gather(*(asyncio.to_thread(post, live, fields) for fields in requests))
    probes = await asyncio.to_thread(probe, live, answers)
    for status, seconds in await answers:
        assert status in (200, 400)
        assert seconds < 60
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[num_before:])]
    return live.loop_lag.quantile(1), max(gaps), probes[-1]


def cheap(tokens: Any, position: int) -> int:
    return 300 + position % 4000


async def compile_while_others_are_served(number: int) -> None:
    """Send ``number`` grammars that take long beside a stream, up to four times: a busy machine delays everything."""
    async with live_server(cheap, step_time_s=0.01) as live, one_stream(live) as times:
        assert (
            await live.chat(regex="[a-z]", max_tokens=1)
        ).status_code == 200  # with a real model this is ready at start
        for attempt in range(4):
            await asyncio.sleep(0.2)
            lag_s, gap_s, probe_s = await disturb(live, [slow(attempt * number + i) for i in range(number)], times)
            print(f"{number} grammars: loop lag {lag_s:.3f} s, gap {gap_s:.3f} s, slowest probe {probe_s:.3f} s")
            if lag_s < 0.1 and gap_s < 0.21 and probe_s < 0.1:  # a gap is 0.01 s otherwise
                break
        else:
            pytest.fail("grammars held up others")
    await asyncio.sleep(2)
    before_s = cpu_s()
    await asyncio.sleep(0.5)
    assert cpu_s() - before_s < 0.25  # nothing goes on compiling


@pytest.mark.alone
@in_loop
async def test_slow_grammars_hold_up_nobody() -> None:
    await compile_while_others_are_served(3)


@pytest.mark.alone
@pytest.mark.full
@pytest.mark.timeout(300)
def test_twenty_slow_grammars_hold_up_nobody() -> None:
    uvloop.run(compile_while_others_are_served(20))
