"""``aserve bench offline`` on a scripted engine, and on a real one with random weights."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from doubles_engine import LIMITS, LetterTokenizer, ScriptedRunner, letters
from doubles_models import TINY

from aserve.bench import offline
from aserve.cli import main
from aserve.config import EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.runner.scripted import RowFailure

STEP_S = 0.01


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedRunner:
    runner = ScriptedRunner(LIMITS, letters, step_time_s=STEP_S)
    engine = functools.partial(AsyncEngine, runner=runner, tokenizer=LetterTokenizer())
    monkeypatch.setattr(offline, "AsyncEngine", engine)
    return runner


def test_tokens_and_steps_are_counted_exactly(scripted: ScriptedRunner, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "2", "--input-len", "8", "--output-len", "6:9", "--json", "-"]
    assert main(["bench", "offline", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    run = result["median"]
    assert result["runs"] == [run]
    assert (run["num_prompts"], run["num_prompt_tokens"]) == (2, 16)
    assert 12 <= run["num_output_tokens"] <= 18
    assert run["output_tokens_per_s"] == pytest.approx(run["num_output_tokens"] / run["duration_s"])
    assert run["total_tokens_per_s"] == pytest.approx((16 + run["num_output_tokens"]) / run["duration_s"])


@pytest.mark.alone
def test_times_are_those_of_the_steps(scripted: ScriptedRunner, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--workload", "single", "--output-len", "40", "--json", "-"]) == 0
    run = json.loads(capsys.readouterr().out)["median"]
    assert run["num_output_tokens"] == 40
    assert run["tpot_ms"] == pytest.approx(1e3 * STEP_S, rel=0.2)
    num_prefill_steps = -(-128 // LIMITS.max_num_batched_tokens)
    assert run["ttft_ms"] == pytest.approx(1e3 * STEP_S * num_prefill_steps, rel=0.3)
    assert run["duration_s"] == pytest.approx((run["ttft_ms"] + 39 * run["tpot_ms"]) / 1e3, rel=0.05)
    assert run["num_steps"] >= 39 + num_prefill_steps


def test_all_requests_are_submitted_at_once(
    scripted: ScriptedRunner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "_step_time_s", 0.0)
    flags = ["--num-prompts", "60", "--input-len", "4", "--output-len", "3", "--max-queued-requests", "5"]
    assert main(["bench", "offline", *flags]) == 0
    assert "| scripted | 60 | 240 | 180 |" in capsys.readouterr().out


def test_runs_repeat_with_the_same_lengths_and_no_prefix_hits(
    scripted: ScriptedRunner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scripted, "_step_time_s", 0.0)
    engines: list[AsyncEngine] = []

    def make(config: EngineConfig) -> AsyncEngine:
        engines.append(AsyncEngine(config, runner=scripted, tokenizer=LetterTokenizer()))  # type: ignore[arg-type]
        return engines[0]

    monkeypatch.setattr(offline, "AsyncEngine", make)
    flags = ["--num-prompts", "5", "--input-len", "20:30", "--output-len", "2:9", "--repeat", "3"]
    assert main(["bench", "offline", *flags, "--json", str(tmp_path / "out.json")]) == 0
    assert "| median of 3 | 5 |" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert len({(run["num_prompt_tokens"], run["num_output_tokens"]) for run in result["runs"]}) == 1
    assert len(result["runs"]) == 3
    rates = sorted(run["output_tokens_per_s"] for run in result["runs"])
    assert result["median"]["output_tokens_per_s"] == rates[1]
    assert engines[0].metrics.num_cached_tokens == 0
    assert engines[0].metrics.num_prompt_tokens == 4 * result["median"]["num_prompt_tokens"]  # with the warm-up


def test_a_request_that_fails_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_late(tokens: Sequence[int], position: int) -> int:
        if position == 12:
            raise RowFailure("not this token")
        return letters(tokens, position)

    runner = ScriptedRunner(LIMITS, fail_late)
    monkeypatch.setattr(
        offline, "AsyncEngine", functools.partial(AsyncEngine, runner=runner, tokenizer=LetterTokenizer())
    )
    assert main(["bench", "offline", "--num-prompts", "3", "--input-len", "8", "--output-len", "8"]) == 2
    assert "not this token" in capsys.readouterr().err


def test_a_model_with_random_weights_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TINY | {"model_type": "qwen3", "vocab_size": 600, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--random-weights", "--device", "cpu", "--num-prompts", "3", "--input-len", "5:20", "--output-len", "4"]
    assert main(["bench", "offline", str(tmp_path), *flags, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["median"]["num_output_tokens"] == 12
    assert result["model"] == tmp_path.name


@pytest.mark.alone
def test_streams_one_request_after_the_other(scripted: ScriptedRunner, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--num-prompts", "12", "--input-len", "8", "--output-len", "20", "--concurrency", "4", "--stagger-s", "0.2"]
    assert main(["bench", "offline", *load, "--warmup", "0", "--json", "-"]) == 0
    run = json.loads(capsys.readouterr().out)["median"]
    assert run["num_output_tokens"] == 240
    # three requests a stream, 20 steps each; the last of the streams begins after three quarters of the stagger
    assert run["duration_s"] == pytest.approx(3 * 20 * STEP_S + 0.15, rel=0.3)
    assert run["steady_s"] == pytest.approx(3 * 20 * STEP_S - 0.15, rel=0.3)
    assert run["steady_output_tokens_per_s"] == pytest.approx(4 / STEP_S, rel=0.15)
    assert run["output_tokens_per_s"] < run["steady_output_tokens_per_s"]


@pytest.mark.parametrize(
    "flags",
    [["--warmup", "-1"], ["--input-len", "9:3"], ["--num-prompts", "0"], ["--repeat", "0"], ["--workload", "huge"]],
)
def test_wrong_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "offline", *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err
