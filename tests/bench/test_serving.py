"""``aserve bench serve`` against a live server, with its clients in processes of their own."""

import asyncio
import json
from pathlib import Path

import pytest
from doubles_http import in_loop, live_server

from aserve.cli import main

STEP_S = 0.002


def bench(*flags: str, step_time_s: float = STEP_S) -> int:
    """Run the command against a scripted server; nothing may be left of its requests."""
    codes: list[int] = []

    @in_loop
    async def measure() -> None:
        async with live_server(step_time_s=step_time_s) as live:
            codes.append(await asyncio.to_thread(main, ["bench", "serve", "--url", live.url, *flags]))
            assert live.engine.metrics.num_aborts == 0

    measure()
    return codes[0]


@pytest.mark.alone
@pytest.mark.parametrize("transport", [["--transport", "sse"], ["--transport", "ws"], ["--endpoint", "completions"]])
@pytest.mark.parametrize("arrival", [["--concurrency", "4"], ["--request-rate", "100"]], ids=["closed", "open"])
def test_every_request_and_token_is_counted(
    transport: list[str], arrival: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--input-len", "12:30", "--output-len", "8", "--num-prompts", "10", "--processes", "2"]
    assert bench(*transport, *arrival, *lengths, "--goodput", "ttft:9000", "--json", "-") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["failed"], summary["first_error"]) == (10, 0, None)
    assert summary["output_tokens"] == 80
    assert summary["output_tokens_per_s"] * summary["duration_s"] == pytest.approx(80)
    assert summary["goodput_requests_per_s"] == summary["requests_per_s"]
    assert 1e3 * STEP_S < summary["ttft_ms"]["p50"] <= summary["e2e_ms"]["p50"]
    assert 1e3 * STEP_S / 2 < summary["tpot_ms"]["p50"] < summary["e2e_ms"]["p50"]
    assert 10 * 12 <= summary["prompt_tokens"] <= 10 * 40
    assert 0 < summary["client_cpu_share"] < 1
    assert 0 <= summary["steady"]["from_s"] <= summary["steady"]["to_s"] <= summary["duration_s"] + 1e-6


def test_the_table_the_files_and_an_objective_that_nothing_meets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]
    assert bench("--num-prompts", "2", "--output-len", "4", "--goodput", "ttft:0.001", "tpot:9000", *files) == 0
    text = capsys.readouterr().out
    assert "| whole run | " in text
    assert "| latency, ms | mean | p50 | p90 | p99 | max |" in text
    assert json.loads((tmp_path / "out.json").read_text())["goodput_requests_per_s"] == 0
    assert (tmp_path / "out.svg").read_text().startswith("<svg")


@pytest.mark.alone
def test_streams_that_begin_spread_out_and_probes_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--concurrency", "4", "--stagger-s", "0.4", "--num-prompts", "12", "--output-len", "100"]
    assert bench(*load, "--transport", "ws", "--probe-interval-s", "0.05", "--json", "-") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steady"]["from_s"] == pytest.approx(0.3, abs=0.15)  # the fourth stream begins after three quarters
    assert summary["steady"]["completed"] >= 4
    probe = summary["probe"]
    assert probe["failed"] == 0
    assert probe["requests"] == pytest.approx(summary["duration_s"] / 0.05, abs=3)
    assert 1e3 * STEP_S < probe["ttft_ms"]["p50"] < 200
    assert 0 < probe["steady_requests"] < probe["requests"]
    assert summary["requests"] == 12


def test_a_second_run_finds_nothing_in_the_prefix_cache() -> None:
    @in_loop
    async def measure() -> None:
        async with live_server() as live:
            flags = ["--url", live.url, "--endpoint", "completions", "--num-prompts", "6", "--output-len", "2"]
            for _ in range(2):
                cached = live.engine.metrics.num_cached_tokens
                assert await asyncio.to_thread(main, ["bench", "serve", *flags]) == 0
            assert live.engine.metrics.num_cached_tokens == cached == 0

    measure()


def test_conversations_are_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talks = [{"conversations": [{"from": "human", "value": f"question {n}"}, {"from": "gpt", "value": "a" * 40}]}
             for n in range(6)]  # fmt: skip
    file = tmp_path / "talks.json"
    file.write_text(json.dumps(talks))
    assert bench("--dataset", str(file), "--num-prompts", "5", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 5 * 10


def test_requests_that_fail_are_counted_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--endpoint", "completions", "--input-len", "9000", "--num-prompts", "3"]  # more than the server takes
    assert bench(*flags, "--json", "-") == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["failed"], summary["completed"], summary["output_tokens"]) == (3, 0, 0)
    assert summary["first_error"].startswith("HTTP 400")
    assert summary["ttft_ms"]["p50"] is None


def test_no_server_is_an_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--transport", "ws", "--endpoint", "completions"], "--endpoint completions goes over SSE"),
        (["--dataset", "x.json", "--input-len", "5"], "--input-len has no meaning"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--goodput", "itl:5"], ["--goodput", "ttft"], ["--request-rate", "0"],
                                   ["--stagger-s", "-1"], ["--stagger-s", "nan"], ["--processes", "0"]])  # fmt: skip
def test_wrong_values_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "serve", *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err
