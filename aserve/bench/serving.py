"""``aserve bench serve``: latency and throughput of a running server, open or closed loop, over SSE or WebSockets."""

import argparse
import asyncio
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import uvloop

from aserve.bench.clients import LoadRequest, RequestTiming, Server, served_model
from aserve.bench.dataset import TextScale, conversation_requests, measure_scale, random_requests
from aserve.bench.load import Arrivals, split_load
from aserve.bench.load_process import Job, Transport, load_processes, make_client
from aserve.bench.plot import plot_run
from aserve.bench.probe import Probe, probing, summarise_probes
from aserve.bench.report import format_table, print_result, write_file
from aserve.bench.server_metrics import scrape, summarise_server
from aserve.bench.sse_client import Endpoint
from aserve.bench.summary import Summary, Window, steady_window, summarise, whole_window
from aserve.bench.workload import HIGHEST_ID, LengthRange, WorkloadShape
from aserve.config import API_KEY_VARIABLE, Config
from aserve.errors import ClientError

START_DELAY_S = 0.1  # for all processes to learn when to start
DEFAULT_LENS = LengthRange(128, 128)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is sent how, and by how many processes."""

    transport: Transport
    endpoint: Endpoint
    arrivals: Arrivals
    num_processes: int
    num_prompts: int
    seed: int  # of lengths and arrivals
    variant: int  # of what prompts say: another in each run, so that a prefix cache holds none of it
    dataset: str | None  # a file; None draws random prompts
    input_lens: LengthRange
    output_lens: LengthRange | None  # None takes those of the file
    probe_interval_s: float | None
    probe_input_len: int

    @property
    def sends_token_ids(self) -> bool:
        """Whether prompts are token ids, which only one endpoint takes."""
        return self.dataset is None and self.transport == "sse" and self.endpoint == "completions"


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What came of it, in seconds on ``time.perf_counter``."""

    model: str
    start_s: float
    timings: list[RequestTiming]
    probes: list[RequestTiming]
    cpu_share: float  # of the busiest client process
    server: dict[str, Any]  # what the server's metrics say of the load

    @property
    def whole(self) -> Window:
        """From the first start to the last end."""
        return whole_window(self.timings, self.start_s)


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Measure and print; returns 1 if a request failed."""
    plan = _read_plan(arguments)
    key = arguments.key or os.environ.get(API_KEY_VARIABLE)
    result = uvloop.run(measure(arguments.url.rstrip("/"), key, arguments.timeout, plan))
    steady = steady_window(result.timings, plan.arrivals.rate is not None)
    summary = summarise_run(plan, result, steady, dict(arguments.goodput or ()))
    print_result(summary, format_summary(summary), arguments.json)
    if arguments.plot:
        write_file(arguments.plot, plot_run(result.timings, result.whole, steady, _title(plan, result)).encode())
    return int(any(timing.error for timing in result.timings))


def _read_plan(arguments: argparse.Namespace) -> LoadPlan:
    if arguments.transport == "ws" and arguments.endpoint != "chat":
        raise ClientError(f"--endpoint {arguments.endpoint} goes over SSE; a WebSocket carries responses")
    if arguments.dataset is not None and arguments.input_len is not None:
        raise ClientError("--input-len has no meaning with --dataset")
    return LoadPlan(
        transport=arguments.transport,
        endpoint=arguments.endpoint,
        arrivals=Arrivals(arguments.concurrency, arguments.request_rate, arguments.stagger_s),
        num_processes=arguments.processes,
        num_prompts=arguments.num_prompts,
        seed=arguments.workload_seed,
        variant=secrets.randbelow(HIGHEST_ID),
        dataset=arguments.dataset,
        input_lens=arguments.input_len or DEFAULT_LENS,
        output_lens=arguments.output_len or (DEFAULT_LENS if arguments.dataset is None else None),
        probe_interval_s=arguments.probe_interval_s,
        probe_input_len=arguments.probe_input_len,
    )


async def measure(url: str, key: str | None, timeout_s: float, plan: LoadPlan) -> LoadRun:
    """Warm up, run the load and the probes beside it."""
    server = Server(url, await served_model(url, key), key, timeout_s)
    client = make_client(server, plan.transport, plan.endpoint)
    try:
        scale = await measure_scale(client, plan.variant)  # warms up as well
        shares = split_load(_requests(plan, scale), plan.arrivals, plan.num_processes, plan.seed)
        jobs = [Job(server, plan.transport, plan.endpoint, share) for share in shares]
        probe = (
            Probe(plan.probe_interval_s, plan.probe_input_len, scale, plan.variant) if plan.probe_interval_s else None
        )
        async with load_processes(jobs) as processes:
            before = await scrape(server)
            start_s = time.perf_counter() + START_DELAY_S
            async with probing(client, probe, start_s) as probes:
                results = await asyncio.gather(*(process.run(start_s) for process in processes))
            after = await scrape(server)
    finally:
        client.close()
    timings = [timing for result in results for timing in result.timings]
    cpu_share = max(result.cpu_share for result in results)
    return LoadRun(server.model, start_s, timings, probes, cpu_share, summarise_server(before, after))


def _requests(plan: LoadPlan, scale: TextScale) -> list[LoadRequest]:
    if plan.dataset is not None:
        return conversation_requests(plan.dataset, plan.num_prompts, plan.output_lens, plan.seed)
    shape = WorkloadShape(plan.num_prompts, plan.input_lens, plan.output_lens or DEFAULT_LENS, plan.seed)
    return random_requests(shape, None if plan.sends_token_ids else scale, plan.variant)


def summarise_run(plan: LoadPlan, result: LoadRun, steady: Window, objectives: Mapping[str, float]) -> Summary:
    """Reduce a run to what is reported: the whole of it, ``steady`` below that, ``probe`` if there were any."""
    timings = result.timings
    errors = [timing.error for timing in timings if timing.error]
    done = [timing for timing in timings if not timing.error]
    summary: Summary = {
        "model": result.model,
        "transport": plan.transport,
        "endpoint": "responses" if plan.transport == "ws" else plan.endpoint,
        "requests": len(timings),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "prompt_tokens": sum(timing.num_prompt_tokens for timing in done),
        "output_tokens": sum(timing.num_output_tokens for timing in done),
        "client_cpu_share": result.cpu_share,
        **summarise(timings, result.whole, objectives),
    }
    after_s = steady.start_s - result.start_s
    summary["steady"] = {
        "from_s": after_s,
        "to_s": after_s + steady.duration_s,
        **summarise(timings, steady, objectives),
    }
    if result.server:
        summary["server"] = result.server
    if plan.probe_interval_s:
        summary["probe"] = summarise_probes(result.probes, steady)
    return summary


def format_summary(summary: Mapping[str, Any]) -> str:
    """Lay the summary out for a terminal: the totals, rates side by side, then a table of latencies."""
    steady: dict[str, Any] = summary["steady"]
    rates = [name for name, value in steady.items() if not isinstance(value, dict) and name in summary]
    latencies = [name for name, value in summary.items() if name.endswith("_ms")]
    totals = [f"{name}: {_short(value)}" for name, value in summary.items()
              if not isinstance(value, dict) and name not in rates and value is not None]  # fmt: skip
    parts = {"whole run": summary, f"steady, {steady['from_s']:.1f} to {steady['to_s']:.1f} s": steady}
    rate_rows = [{"rates": part, **{name: values[name] for name in rates}} for part, values in parts.items()]
    rows = [{"latency, ms": f"{name[:-3]}, {part.partition(',')[0]}", **values[name]}
            for name in latencies for part, values in parts.items()]  # fmt: skip
    rows += [{"latency, ms": f"probe {name[:-3]}", **value} for name, value in summary.get("probe", {}).items()
             if name.endswith("_ms")]  # fmt: skip
    blocks = ["\n".join(totals), format_table(rate_rows), format_table(rows)]
    if server := summary.get("server"):
        counts = [f"{name}: {value}" for name, value in server.items() if not name.endswith("_ms")]
        server_rows = [{"of the server, ms": name[:-3], **value} for name, value in server.items()
                       if name.endswith("_ms")]  # fmt: skip
        blocks += ["server " + ", ".join(counts), format_table(server_rows)]
    if probe := summary.get("probe"):
        blocks.append(f"probes: {probe['requests']}, {probe['failed']} failed, {probe['steady_requests']} while steady")
    return "\n\n".join(blocks)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _title(plan: LoadPlan, result: LoadRun) -> str:
    arrivals = plan.arrivals
    load = f"{arrivals.concurrency} streams" if arrivals.rate is None else f"{arrivals.rate:g} requests/s"
    return f"{result.model}, {plan.transport}, {load}, {plan.num_prompts} requests"
