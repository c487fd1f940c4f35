"""The text that perplexity is measured on is found from any folder, or named as missing."""

from pathlib import Path

import pytest

from aserve.bench.perplexity import DEFAULT_TEXT, main


def test_the_default_text_does_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert DEFAULT_TEXT.is_file()


def test_a_missing_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--text", str(tmp_path / "none.txt")])
    assert stopped.value.code == 2
    assert "none.txt" in capsys.readouterr().err
