"""``aserve bench tool-loop``: a loop of tools on one socket, and the same loop over HTTP with the whole history.

Each loop gets an engine of its own, so that neither finds anything of the other in its prefix cache. On the socket a
turn sends the tool's result and the id of the response before; over HTTP it sends everything so far again. The model
has to call one of two tools in every turn, so it need not be good at it, and the loops are the same token for token
unless a near tie tips over. Requests of others between the turns push out of the prefix cache what is not leased to an
open conversation. Server and client share one process.
"""

import argparse
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any, Literal

import orjson
import uvloop

from aserve.bench.clients import Server, post
from aserve.bench.dataset import random_text
from aserve.bench.report import format_table, print_result
from aserve.bench.ws_client import PATH, ResponseSocket
from aserve.config import Config
from aserve.engine.async_engine import AsyncEngine
from aserve.errors import AserveError
from aserve.server.serve import running_server

Way = Literal["socket", "http"]
WAYS: tuple[Way, ...] = ("socket", "http")
Ask = Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]

NUM_WARM_UP_TURNS = 2  # compile the grammar and open what stays open
MAX_CALL_TOKENS = 200
OTHER_WORDS = 500
INSTRUCTIONS = "Session {session}. You look for an error in a program. Call one tool at a time."
STRICT = {"type": "object", "additionalProperties": False}
QUERY = {"type": "string", "minLength": 20, "maxLength": 60, "pattern": "^[a-z ]+$"}
LINE = {"type": "integer", "minimum": 1, "maximum": 999}
TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": {**STRICT, "properties": properties, "required": list(properties)},
        "strict": True,
    }
    for name, description, properties in (
        ("search", "Search the program for words.", {"query": QUERY}),
        ("read", "Read the program from a line on.", {"line": LINE}),
    )
]


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of one request by its usage, and milliseconds from sending it to its complete answer."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_ms: float


@dataclass(frozen=True, slots=True)
class LoopShape:
    """How many calls, words of each tool's result, how calls are sampled, requests of others after each turn."""

    num_turns: int
    num_words: int
    temperature: float
    num_others: int


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Measure and print."""
    config = replace(config, server=replace(config.server, port=0))
    shape = LoopShape(arguments.turns, arguments.result_words, arguments.temperature, arguments.others)
    model, loops = uvloop.run(measure(config, shape, arguments.repeat))
    result: dict[str, Any] = {"model": model, **{way: [asdict(turn) for turn in loops[way]] for way in WAYS}}
    print_result(result, f"model: {model}\n\n{format_table(rows(loops))}", arguments.json)
    return 0


async def measure(config: Config, shape: LoopShape, num_runs: int) -> tuple[str, dict[Way, list[Turn]]]:
    """Run both loops ``num_runs`` times in turn; return the model's name and the turns with their median durations."""
    runs: dict[Way, list[list[Turn]]] = {way: [] for way in WAYS}
    model = ""
    for _ in range(num_runs):
        for way in WAYS:
            async with serving(config) as server, asking(server, way) as ask:
                warm_up = replace(shape, num_turns=NUM_WARM_UP_TURNS)
                await run_loop(server, ask, warm_up, session=1, has_state=way == "socket")
                runs[way].append(await run_loop(server, ask, shape, session=2, has_state=way == "socket"))
                model = server.model
    return model, {way: [median_turn(turns) for turns in zip(*runs[way], strict=True)] for way in WAYS}


def median_turn(turns: Sequence[Turn]) -> Turn:
    """Return the first of the same turn in several runs, with the median of their durations."""
    return replace(turns[0], duration_ms=median(turn.duration_ms for turn in turns))


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Server]:
    """Start an engine and a server for it."""
    engine = AsyncEngine(config.engine)
    async with engine, running_server(config, engine) as running:
        yield Server(running.url, engine.model_name, config.server.api_key)


@asynccontextmanager
async def asking(server: Server, way: Way) -> AsyncIterator[Ask]:
    """Yield what sends the body of one request and returns the response."""
    if way == "http":
        yield lambda body: ask_over_http(server, body)
        return
    socket = ResponseSocket(server)
    await server.connect(socket)
    await socket.opened
    try:
        yield lambda body: ask_on_socket(socket, body)
    finally:
        socket.close()


async def ask_over_http(server: Server, body: dict[str, Any]) -> Mapping[str, Any]:
    """Send one request on a connection of its own."""
    response: Mapping[str, Any] = orjson.loads(await post(server, PATH, orjson.dumps(body)))
    return response


async def ask_on_socket(socket: ResponseSocket, body: dict[str, Any]) -> Mapping[str, Any]:
    """Send one request and read its events up to the last."""
    ends: list[Mapping[str, Any]] = []

    def take(event: Mapping[str, Any]) -> bool:
        if event["type"] in ("error", "response.failed"):
            raise AserveError(str(event.get("error") or event["response"]["error"]))
        if event["type"] in ("response.completed", "response.incomplete"):
            ends.append(event["response"])
        return bool(ends)

    await socket.run(orjson.dumps({"type": "response.create", **body}), take)
    return ends[0]


async def run_loop(server: Server, ask: Ask, shape: LoopShape, *, session: int, has_state: bool) -> list[Turn]:
    """Answer call after call; ``has_state`` sends only what is new. Raises AserveError for a turn without a call."""
    rng = random.Random(session)
    history: list[Mapping[str, Any]] = [{"role": "user", "content": random_text(shape.num_words, rng)}]
    continued: dict[str, Any] = {"input": history}
    turns = []
    for number in range(shape.num_turns):
        body = request_fields(shape, session, number) | continued
        start_s = time.perf_counter()
        response = await ask(body)
        turns.append(read_turn(response, time.perf_counter() - start_s))
        result = {
            "type": "function_call_output",
            "call_id": find_call(response)["call_id"],
            "output": random_text(shape.num_words, rng),
        }
        if has_state:
            continued = {"input": [result], "previous_response_id": response["id"]}
        else:
            history += [*response["output"], result]
        await send_others(server, shape.num_others, rng)
    return turns


async def send_others(server: Server, count: int, rng: random.Random) -> None:
    """Let the server compute and forget ``count`` other conversations, one after the other."""
    for _ in range(count):
        body = {"input": random_text(OTHER_WORDS, rng), "max_output_tokens": 1, "store": False}
        await post(server, PATH, orjson.dumps(body))


def request_fields(shape: LoopShape, session: int, number: int) -> dict[str, Any]:
    """Return what both ways send in a turn; instructions are not inherited from the response before."""
    return {
        "instructions": INSTRUCTIONS.format(session=session),
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": MAX_CALL_TOKENS,
        "temperature": shape.temperature,
        "seed": number,
        "store": False,
    }


def read_turn(response: Mapping[str, Any], duration_s: float) -> Turn:
    """Take the counts of ``response``."""
    usage = response["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Turn(usage["input_tokens"], cached, usage["output_tokens"], 1000 * duration_s)


def find_call(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the call that ``response`` has to hold; raises AserveError if it has none."""
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    if response["status"] != "completed" or not calls:
        raise AserveError(f"a turn ended as {response['status']} with {len(calls)} calls: {response['output']}")
    call: Mapping[str, Any] = calls[0]
    return call


def rows(loops: Mapping[Way, Sequence[Turn]]) -> list[dict[str, object]]:
    """Return a row for each turn and one for all.

    ``new`` are the tokens by which the prompt on the socket is longer than what the server had computed or said;
    ``computed`` those of the prompt that were in no cache, ``new`` among them.
    """
    socket, http = (loops[way] for way in WAYS)
    seen = [0, *(turn.prompt_tokens + turn.output_tokens for turn in socket[:-1])]
    new = [turn.prompt_tokens - before for turn, before in zip(socket, seen, strict=True)]
    table = [row(str(number), *columns) for number, columns in enumerate(zip(new, socket, http, strict=True), 1)]
    return [*table, row("all", sum(new), total(socket), total(http))]


def total(turns: Sequence[Turn]) -> Turn:
    """Add up turns."""
    return Turn(**{column.name: sum(getattr(turn, column.name) for turn in turns) for column in fields(Turn)})


def row(name: str, num_new: int, socket: Turn, http: Turn) -> dict[str, object]:
    """Lay one turn of both loops side by side."""
    columns: dict[str, object] = {"turn": name, "prompt": socket.prompt_tokens, "new": num_new}
    for way, turn in (("socket", socket), ("HTTP", http)):
        columns |= {
            f"{way}: cached": turn.cached_tokens,
            f"{way}: computed": turn.prompt_tokens - turn.cached_tokens,
            f"{way}: ms": round(turn.duration_ms),
        }
    return columns | {"HTTP / socket, ms": http.duration_ms / socket.duration_ms}
