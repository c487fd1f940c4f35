"""``aserve bench tool-loop`` on scripted engines, one for each loop."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from doubles_http import LIMITS, demo_tokenizer, say
from doubles_tuning import make_engine

from aserve.bench import tool_loop
from aserve.bench.tool_loop import Turn, median_turn
from aserve.cli import main
from aserve.engine.async_engine import AsyncEngine
from aserve.runner.scripted import ScriptedRunner

CALL = '<tool_call>\n{"name": "read", "arguments": {"line": 21}}\n</tool_call>'
USUAL = demo_tokenizer().encode(CALL)
BY_LETTERS = [token for letter in CALL for token in demo_tokenizer().encode(letter)]
TURNS = 3
WORDS = 40


def measure(reply: list[int], monkeypatch: pytest.MonkeyPatch, *flags: str, num_pages: int = LIMITS.num_pages) -> int:
    """Run the command on engines that give the same reply in every turn."""

    def engine(config: object) -> AsyncEngine:
        limits = replace(LIMITS, num_pages=num_pages)
        return make_engine(runner=ScriptedRunner(limits, say(reply)), tokenizer=demo_tokenizer())

    monkeypatch.setattr(tool_loop, "AsyncEngine", engine)
    return main(["bench", "tool-loop", "--turns", str(TURNS), "--result-words", str(WORDS), *flags])


@pytest.mark.parametrize("reply", [USUAL, BY_LETTERS], ids=["usual tokens", "letters"])
def test_a_lane_computes_what_is_new_and_at_most_a_page_besides(
    reply: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert measure(reply, monkeypatch, "--json", str(tmp_path / "loops.json")) == 0
    loops = json.loads((tmp_path / "loops.json").read_text())
    socket, http = loops["socket"], loops["http"]
    num_said = len(reply) + 1  # and the end
    assert len(socket) == len(http) == TURNS
    assert (socket[0]["cached_tokens"], http[0]["cached_tokens"]) == (0, 0)
    assert socket[0]["prompt_tokens"] == http[0]["prompt_tokens"]
    for before, turn in pairwise(socket):
        seen = before["prompt_tokens"] + num_said
        assert turn["output_tokens"] == num_said
        assert WORDS < turn["prompt_tokens"] - seen < 2 * WORDS
        assert seen - LIMITS.page_size <= turn["cached_tokens"] < seen
    for before, turn in pairwise(http):
        seen = before["prompt_tokens"] + (num_said if reply is USUAL else 0)  # letters become other tokens
        assert seen - LIMITS.page_size <= turn["cached_tokens"] <= seen + 1  # the call begins with the same "<"
    check_table(capsys.readouterr().out, socket)


def check_table(text: str, socket: list[dict[str, int]]) -> None:
    """Check the columns of the socket, and that the last row adds up the others."""
    title, _, head, _, *lines = text.splitlines()
    assert title.startswith("model: ")
    names = [name.strip() for name in head.strip("|").split("|")]
    *rows, last = [
        dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True)) for line in lines
    ]
    assert [row["turn"] for row in rows] == [str(number) for number in range(1, TURNS + 1)]
    assert last["turn"] == "all"
    for name in ("prompt", "new", "socket: cached", "socket: computed", "HTTP: cached", "HTTP: computed"):
        assert int(last[name]) == sum(int(row[name]) for row in rows), name
    for row, turn in zip(rows, socket, strict=True):
        assert (int(row["prompt"]), int(row["socket: cached"])) == (turn["prompt_tokens"], turn["cached_tokens"])
        assert 0 <= int(row["socket: computed"]) - int(row["new"]) <= LIMITS.page_size


def test_others_push_out_what_is_not_leased(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(USUAL, monkeypatch, "--others", "3", "--json", "-", num_pages=80) == 0
    loops = json.loads(capsys.readouterr().out)
    assert [turn["cached_tokens"] for turn in loops["http"]] == [0] * TURNS
    for before, turn in pairwise(loops["socket"]):
        assert turn["cached_tokens"] >= before["prompt_tokens"] + len(USUAL) + 1 - LIMITS.page_size


def test_a_turn_without_a_call_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(demo_tokenizer().encode("I would rather not."), monkeypatch) == 2
    assert "a turn ended as" in capsys.readouterr().err


def test_durations_of_several_runs_become_their_median() -> None:
    turns = [Turn(100, 80, 9, duration_ms) for duration_ms in (30.0, 10.0, 20.0)]
    assert median_turn(turns) == Turn(100, 80, 9, 20.0)
