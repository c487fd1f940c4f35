"""``aserve bench offline`` on a scripted engine."""

import functools
import json

import pytest
from doubles_engine import LIMITS, LetterTokenizer, ScriptedRunner, letters

from aserve.bench import offline
from aserve.cli import main
from aserve.engine.async_engine import AsyncEngine


@pytest.fixture(autouse=True)
def scripted_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = functools.partial(AsyncEngine, runner=ScriptedRunner(LIMITS, letters), tokenizer=LetterTokenizer())
    monkeypatch.setattr(offline, "AsyncEngine", engine)


def test_tokens_are_counted_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "2", "--input-len", "8", "--output-len", "8", "--json"]
    assert main(["bench", "offline", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_prompts"], result["num_prompt_tokens"], result["num_output_tokens"]) == (2, 16, 16)
    assert result["output_tokens_per_s"] == pytest.approx(16 / result["duration_s"])
    assert result["total_tokens_per_s"] == pytest.approx(32 / result["duration_s"])


def test_more_prompts_than_the_queue_takes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "60", "--input-len", "4", "--output-len", "3", "--max-queued-requests", "5"]
    assert main(["bench", "offline", *flags]) == 0
    assert "| scripted | 60 | 240 | 180 |" in capsys.readouterr().out
