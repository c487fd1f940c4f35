"""``aserve check`` says what this machine offers."""

import json
import platform
from importlib import metadata

import pytest

from aserve.cli import main
from aserve.commands import check


def test_json_names_devices_backends_methods_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert platform.machine() in report["devices"]["cpu"]
    assert report["python"] == platform.python_version()
    assert report["versions"]["torch"] == metadata.version("torch")
    assert report["attention_backends"]["torch"] is None
    assert report["quantization"]["none"] is None


def test_the_table_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    text = capsys.readouterr().out
    assert f"torch              {metadata.version('torch')}" in text
    assert "attention backends" in text
    assert "usable" in text


def test_a_backend_for_one_phase_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"fa": "for decode: it has no split-KV", "fi": "the package is not installed", "torch": None}
    monkeypatch.setattr(check, "refusals_here", lambda: report)
    lines = check.format_report(check.machine_report()).splitlines()
    assert "  fa                 refused for decode: it has no split-KV" in lines
    assert "  fi                 refused: the package is not installed" in lines
    assert "  torch              usable" in lines
