"""The flags of ``aserve bench``; nothing heavy is imported, so that ``--help`` answers at once."""

import argparse
import math
from typing import Any

from aserve.bench.workload import WORKLOADS, LengthRange
from aserve.config import API_KEY_VARIABLE
from aserve.flags import add_command, add_settings

OBJECTIVES = ("ttft", "tpot", "e2e")


def add_bench(commands: Any) -> None:
    """Add ``bench`` and what it can measure."""
    bench = commands.add_parser("bench", help="measure speed", description="Measure speed.")
    kinds = bench.add_subparsers(title="kinds", required=True, metavar="KIND")
    _add_offline(kinds)
    _add_serve(kinds)
    _add_tool_loop(kinds)
    _add_kernels(kinds)


def _add_offline(kinds: Any) -> None:
    offline = add_command(
        kinds,
        "offline",
        "bench.offline",
        "measure tokens per second of the engine without a server, greedy and with exact lengths",
    )
    add_settings(offline, "engine", with_model=True)
    shapes = "; ".join(
        f"{name}: {shape.num_prompts} x {shape.input_lens} in, {shape.output_lens} out"
        for name, shape in WORKLOADS.items()
    )
    group = offline.add_argument_group("workload")
    group.add_argument(
        "--workload", choices=tuple(WORKLOADS), default="even",
        help=f"what the flags below do not say ({shapes}; default: even)",
    )  # fmt: skip
    group.add_argument("--num-prompts", type=positive, metavar="N", help="requests")
    add_lengths(group, "as the workload")
    group.add_argument("--workload-seed", type=int, metavar="N", help="seed of lengths and token ids (default: 0)")
    offline.add_argument("--repeat", type=positive, default=1, metavar="N", help="runs, with medians (default: 1)")
    offline.add_argument(
        "--concurrency", type=positive, metavar="N",
        help="streams, each with one request after the other; default: all requests at once",
    )  # fmt: skip
    _add_stagger(offline)
    offline.add_argument(
        "--warmup", type=count, default=16, metavar="N",
        help="requests before the first run, the first of the workload with other ids and 32 tokens out "
        "at most (default: 16)",
    )  # fmt: skip
    add_json(offline)


def _add_serve(kinds: Any) -> None:
    serve = add_command(
        kinds,
        "serve",
        "bench.serving",
        "measure latency and throughput of a running server, with clients in processes of their own",
    )
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="server (default: http://127.0.0.1:8000)")
    serve.add_argument("--api-key", dest="key", help=f"key to send; also {API_KEY_VARIABLE}")
    serve.add_argument(
        "--transport", choices=("sse", "ws"), default="sse",
        help="completions over SSE, or responses over WebSockets (default: sse)",
    )  # fmt: skip
    serve.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="over SSE (default: chat)")
    serve.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="S",
        help="seconds until a request counts as failed (default: 600)",
    )  # fmt: skip
    _add_arrivals(serve.add_argument_group("load"))
    _add_requests(serve.add_argument_group("requests"))
    _add_findings(serve.add_argument_group("results"))
    add_json(serve)


def _add_tool_loop(kinds: Any) -> None:
    loop = add_command(
        kinds,
        "tool-loop",
        "bench.tool_loop",
        "measure a loop of tools on one WebSocket against the same loop over HTTP: tokens recomputed and time, by turn",
    )
    add_settings(loop, "engine", with_model=True)
    group = loop.add_argument_group("loop")
    group.add_argument("--turns", type=positive, default=20, metavar="N", help="calls of a tool (default: 20)")
    group.add_argument(
        "--result-words", type=positive, default=100, metavar="N", help="words of each tool's result (default: 100)"
    )
    group.add_argument(
        "--temperature", type=not_negative, default=0.0, metavar="X", help="of the calls (default: 0, greedy)"
    )
    group.add_argument(
        "--others", type=count, default=0, metavar="N",
        help="requests of others after each turn, 500 new words each, which fill the prefix cache; see --num-pages "
        "(default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--repeat", type=positive, default=1, metavar="N",
        help="runs of both loops in turn, each on a new engine, with medians of the times (default: 1)",
    )  # fmt: skip
    add_json(loop)


def _add_arrivals(group: Any) -> None:
    group.add_argument("--num-prompts", type=positive, default=64, metavar="N", help="requests in all (default: 64)")
    group.add_argument(
        "--concurrency", type=positive, default=8, metavar="N",
        help="closed loop: streams, each with one request after the other (default: 8)",
    )  # fmt: skip
    _add_stagger(group)
    group.add_argument(
        "--request-rate", type=seconds, metavar="X", help="open loop (Poisson) of X requests per second instead"
    )
    group.add_argument(
        "--processes", type=positive, default=1, metavar="N",
        help="client processes that share the load (default: 1); see client_cpu_share in the results",
    )  # fmt: skip
    group.add_argument(
        "--probe-interval-s", type=seconds, metavar="S",
        help="seconds between short new requests beside the load, reported apart; default: none",
    )  # fmt: skip
    group.add_argument(
        "--probe-input-len", type=positive, default=32, metavar="N", help="tokens of such a request (default: 32)"
    )


def _add_stagger(group: Any) -> None:
    group.add_argument(
        "--stagger-s", type=not_negative, default=0.0, metavar="S",
        help="seconds over which the streams begin, for a steady state in which they end at different times "
        "(default: 0)",
    )  # fmt: skip


def _add_requests(group: Any) -> None:
    group.add_argument(
        "--dataset", metavar="FILE",
        help="conversations in ShareGPT's format, a JSON list; default: random prompts, token ids for completions, "
        "else text whose length is fitted to the server's tokenizer",
    )  # fmt: skip
    add_lengths(group, "128; with --dataset: those of the file")
    group.add_argument(
        "--workload-seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of lengths, times and the choice of conversations; random prompts are new in each run, so that the "
        "server's prefix cache holds none of them (default: 0)",
    )


def _add_findings(group: Any) -> None:
    group.add_argument(
        "--goodput", type=objective, nargs="+", metavar="NAME:MS",
        help="count requests within all of these, such as ttft:200 tpot:50 e2e:9000, in milliseconds",
    )  # fmt: skip
    group.add_argument("--plot", metavar="FILE", help="write an SVG picture of throughput, gaps and latencies")


def _add_kernels(kinds: Any) -> None:
    kernels = add_command(
        kinds,
        "kernels",
        "bench.kernels",
        "measure attention backends on their own: error against float32, time, share of what the device can do",
    )
    kernels.add_argument(
        "--backends", nargs="+", metavar="NAME", help="backends; default: all, those refused here with the reason"
    )
    kernels.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    kernels.add_argument(
        "--dtype", dest="query_dtype", choices=("float32", "bfloat16", "float16"),
        help="type of queries; default: bfloat16 on a GPU, float32 on a CPU",
    )  # fmt: skip
    kernels.add_argument(
        "--kv-dtype", choices=("float32", "bfloat16", "float16", "float8_e4m3fn", "nvfp4"),
        help="type of keys and values; default: that of queries",
    )  # fmt: skip
    kernels.add_argument(
        "--num-threads",
        type=positive,
        default=argparse.SUPPRESS,
        metavar="N",
        help="compute threads on a CPU; default: cores of this machine or container",
    )
    group = kernels.add_argument_group("shapes")
    group.add_argument(
        "--heads", nargs="+", type=heads, default=[(32, 8)], metavar="H/K",
        help="query heads and key-value heads (default: 32/8)",
    )  # fmt: skip
    group.add_argument("--head-dim", nargs="+", type=positive, default=[128], metavar="N", help="default: 128")
    group.add_argument(
        "--page-size",
        dest="page_sizes",
        nargs="+",
        type=positive,
        default=[16],
        metavar="N",
        help="tokens per page (default: 16)",
    )
    group.add_argument(
        "--decode", nargs="+", metavar="BxL[..M]",
        help="sequences x keys of each, one new token included, or from L to M keys; "
        "default of both: a few that are usual on the device",
    )  # fmt: skip
    group.add_argument(
        "--prefill", nargs="+", metavar="BxT[+C]", help="sequences x new tokens of each, behind C cached ones"
    )
    kernels.add_argument(
        "--rounds", type=positive, default=20, metavar="N",
        help="rounds over pages larger than the cache, with medians (default: 20)",
    )  # fmt: skip
    add_json(kernels)


def heads(text: str) -> tuple[int, int]:
    """Read numbers of query heads and of key-value heads."""
    num_heads, _, num_kv_heads = text.partition("/")
    try:
        pair = positive(num_heads), positive(num_kv_heads)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be query heads/key-value heads, got {text!r}") from None
    if pair[0] % pair[1]:
        raise argparse.ArgumentTypeError(f"{pair[0]} heads cannot share {pair[1]} key-value heads evenly")
    return pair


def objective(text: str) -> tuple[str, float]:
    """Read a latency and its limit."""
    name, _, limit = text.partition(":")
    if name not in OBJECTIVES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(OBJECTIVES)} with milliseconds, got {text!r}")
    return name, seconds(limit)


def seconds(text: str) -> float:
    """Read a number above 0."""
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive, got {text!r}")
    return value


def not_negative(text: str) -> float:
    """Read a number that may be 0."""
    return 0.0 if _number(text) == 0 else seconds(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def count(text: str) -> int:
    """Read a number of things that may be 0."""
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def positive(text: str) -> int:
    """Read a number of things."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def lengths(text: str) -> LengthRange:
    """Read a number of tokens, or the lowest and the highest."""
    try:
        return LengthRange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_lengths(parser: Any, default: str) -> None:
    """Add the sizes of requests, None if they are not given; ``default`` says what is taken then."""
    for flag, what in (("--input-len", "tokens of each prompt"), ("--output-len", "tokens to generate for each")):
        help = f"{what}, or LOW:HIGH for a uniform draw (default: {default})"
        parser.add_argument(flag, type=lengths, metavar="N|LOW:HIGH", help=help)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add where results go besides the table."""
    parser.add_argument("--json", metavar="FILE", help="write the results there too; '-' prints them, without a table")
