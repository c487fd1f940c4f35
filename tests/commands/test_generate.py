"""``aserve generate`` on a scripted engine, from the flags to the lines that it writes."""

import functools
import io
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from doubles_engine import EOS, LIMITS, LetterTokenizer, ScriptedRunner, letters

from aserve.cli import main
from aserve.commands import generate
from aserve.engine.async_engine import AsyncEngine

Generate = Callable[..., tuple[int, list[dict[str, Any]]]]


def spell_back(tokens: Sequence[int], position: int) -> int:
    """Say the prompt's letters in capitals, then end; prompts are in small letters."""
    prompt = [token for token in tokens[:position] if token >= 97]
    return prompt[position - len(prompt)] - 32 if position < 2 * len(prompt) else EOS


def use_engine(monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    engine = functools.partial(AsyncEngine, runner=ScriptedRunner(LIMITS, script), tokenizer=LetterTokenizer())
    monkeypatch.setattr(generate, "AsyncEngine", engine)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generate:
    """Run the command on lines, objects or raw text, and return its exit code and what it wrote."""

    def call(lines: Sequence[Any], *flags: str, script: Any = spell_back) -> tuple[int, list[dict[str, Any]]]:
        use_engine(monkeypatch, script)
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        code = main(["generate", "--input", str(source), "--output", str(target), *flags])
        return code, [json.loads(line) for line in target.read_text().splitlines()]

    return call


def test_every_kind_of_prompt_is_answered_in_order(run: Generate) -> None:
    lines = [
        {"prompt": "abc", "id": 7},
        "",
        {"prompt": [97, 98], "custom_id": "x"},
        {"messages": [{"role": "user", "content": "hey"}], "max_tokens": 2, "seed": None},
    ]
    code, answers = run(lines, "--max-tokens", "50", script=letters)
    assert code == 0
    assert [(one.get("id"), one.get("custom_id"), one["num_prompt_tokens"]) for one in answers] == [
        (7, None, 3), (None, "x", 2), (None, None, 4),
    ]  # fmt: skip
    assert [one["num_output_tokens"] for one in answers] == [50, 50, 2]
    assert [len(one["text"]) for one in answers] == [50, 50, 2]
    assert not {"logprobs", "prompt_logprobs", "error"} & answers[0].keys()


def test_the_text_is_what_the_model_says(run: Generate) -> None:
    code, answers = run([{"prompt": "abc"}, {"prompt": "hello", "stop": "LO"}, {"prompt": "hello", "stop": ["E"]}])
    assert code == 0
    assert [(one["text"], one["finish_reason"]) for one in answers] == [("ABC", "stop"), ("HEL", "stop"), ("H", "stop")]
    assert answers[0]["token_ids"] == [65, 66, 67, EOS]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"prompt": "abc", "stop": 5}, "stop must be"), ({"prompt": "abc", "logit_bias": []}, "logit_bias must be"),
        ({"prompt": "abc", "logit_bias": {"x": 1}}, "logit_bias must map"), ({"prompt": 5}, "prompt must be"),
        ({"prompt": [1, "a"]}, "prompt must be"), ({"prompt": [True]}, "prompt must be"), ({"prompt": None}, "prompt"),
        ({"messages": "hi"}, "messages must be"), ({"messages": []}, "messages must be"),
        ({"messages": ["hi"]}, "messages must be"), ({"prompt": "abc", "max_tokens": 1.5}, "max_tokens must be"),
        ({"prompt": "abc", "logit_bias": {"999": 1}}, "logit_bias names"), ({"prompt": ""}, "no tokens"),
        ({"prompt": "a" * 600}, "512 tokens"), ({"text": "abc"}, "neither"), ([1], "not a JSON object"),
        ('{"prompt": ', "not JSON"),
    ],
)  # fmt: skip
def test_a_bad_line_has_an_error_and_the_others_run(run: Generate, bad: Any, named: str) -> None:
    if isinstance(bad, dict):
        bad = bad | {"id": "b"}
    code, answers = run([{"prompt": "abc"}, bad, {"prompt": "xyz"}])
    assert code == 1
    assert [one.get("text") for one in answers] == ["ABC", None, "XYZ"]
    assert named in answers[1]["error"]
    assert answers[1].keys() == ({"id", "error"} if isinstance(bad, dict) else {"error"})


def test_the_number_of_a_bad_line_is_named(run: Generate) -> None:
    _, answers = run([{"prompt": "abc"}, "", {"prompt": 5}])
    assert answers[1]["error"].startswith("line 3: ")


def test_unknown_fields_are_ignored_with_one_warning_each(run: Generate, caplog: pytest.LogCaptureFixture) -> None:
    code, answers = run([{"prompt": "abc", "max_tokns": 1, "topic": "x"}, {"prompt": "xyz", "topic": "y"}])
    assert code == 0
    assert [one["text"] for one in answers] == ["ABC", "XYZ"]
    assert [record.getMessage() for record in caplog.records if record.name.endswith("prompt_lines")] == [
        "line 1: ignoring the unknown field 'max_tokns'; did you mean max_tokens?",
        "line 1: ignoring the unknown field 'topic'",
    ]


def test_logprobs_are_written_where_they_are_asked_for(run: Generate) -> None:
    code, answers = run([{"prompt": "abc", "logprobs": 1, "prompt_logprobs": 0, "max_tokens": 2}])
    assert code == 0
    first = {"token_id": 65, "logprob": 0.0, "top": [[65, 0.0]]}
    assert answers[0]["logprobs"] == [first, first | {"token_id": 66, "top": [[66, 0.0]]}]
    assert answers[0]["prompt_logprobs"] == [None, *({"token_id": one, "logprob": 0.0, "top": []} for one in (98, 99))]


def test_more_lines_than_the_queue_takes(run: Generate) -> None:
    lines = [{"prompt": chr(97 + number % 26), "id": number} for number in range(200)]
    code, answers = run(lines, "--max-queued-requests", "3")
    assert code == 0
    assert [(one["id"], one["text"]) for one in answers] == [(n, chr(65 + n % 26)) for n in range(200)]


def test_a_finished_line_is_written_while_a_later_one_runs(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    is_written = threading.Event()

    def script(tokens: Sequence[int], position: int) -> int:
        if ord("z") in tokens[:position]:
            assert is_written.wait(20), "the first answer was kept until the last one was done"
        return spell_back(tokens, position)

    class Target(io.BytesIO):
        def flush(self) -> None:
            if self.getvalue().count(b"\n") == 1:
                is_written.set()

    use_engine(monkeypatch, script)
    target = Target()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(target))
    flags = ["--max-num-seqs", "1", "--max-queued-requests", "1"]
    assert main(["generate", "--prompt", "a", "--prompt", "z", *flags]) == 0
    assert [json.loads(line)["text"] for line in target.getvalue().splitlines()] == ["A", "Z"]


def test_standard_streams(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    use_engine(monkeypatch, spell_back)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "xyz"}\n')))
    assert main(["generate", "--prompt", "abc", "--input", "-"]) == 0
    assert [json.loads(line)["text"] for line in capfdbinary.readouterr().out.splitlines()] == ["ABC", "XYZ"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "nothing to generate"), (["--input", "/no/such"], "/no/such"),
        (["--prompt", "a", "--top-p", "2"], "top_p"),
        (["--prompt", "a", "--output", "/no/such/out"], "/no/such/out"),
    ],
)  # fmt: skip
def test_wrong_flags_end_with_2(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *flags]) == 2
    assert named in capsys.readouterr().err
