"""Settings: precedence, strictness and the examples that are shipped."""

from pathlib import Path
from typing import Any

import pytest

from aserve.cli import build_parser, main, read_config
from aserve.config import Config, load_config, setting_fields
from aserve.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def config_of(*argv: str) -> Config:
    return read_config(build_parser().parse_args(argv))


def test_defaults_listen_on_loopback_only() -> None:
    config = Config()
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert config.engine.page_size == 16


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_examples_load(path: Path) -> None:
    assert load_config(path) != Config()


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[engine]\nmax_num_seqs = 3\npage_size = 32\n[server]\nport = 9\n")
    config = config_of("serve", "some/model", "--config", str(file), "--page-size", "64", "--no-overlap")
    assert (config.engine.max_num_seqs, config.engine.page_size, config.server.port) == (3, 64, 9)
    assert (config.engine.model, config.engine.overlap, config.engine.prefix_cache) == ("some/model", False, True)


def test_the_environment_gives_the_key_and_a_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASERVE_API_KEY", "from-env")
    assert config_of("serve").server.api_key == "from-env"
    assert config_of("serve", "--api-key", "from-flag").server.api_key == "from-flag"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[engine]\nmax_seqs = 3", "engine.max_seqs"),
        ("[engin]\npage_size = 3", "[engin]"),
        ("page_size = 3", "[page_size]"),
        ("[engine]\npage_size = '3'", "engine.page_size"),
        ("[engine]\npage_size = true", "engine.page_size"),
        ("[engine]\npage_size = 257", "engine.page_size"),
        ("[engine]\nmax_num_seqs = 0", "engine.max_num_seqs"),
        ("[engine]\ndevice = 'tpu'", "engine.device"),
        ("[server]\nport = 70000", "server.port"),
        ("[server]\nallowed_origins = 'x'", "server.allowed_origins"),
        ("[engine\n", "cannot read"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert named in str(caught.value)


def test_the_command_line_reports_a_wrong_setting_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/no/such/file.toml"]) == 2
    assert "/no/such/file.toml" in capsys.readouterr().err


@pytest.mark.parametrize("section", ["engine", "server"])
def test_help_names_every_setting_with_its_default(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for setting, _ in setting_fields(section):
        flag: Any = "MODEL" if setting.name == "model" else f"--{setting.name.replace('_', '-')}"
        assert flag in text
        if setting.default not in (None, ()) and not isinstance(setting.default, bool):
            assert f"(default: {setting.default})" in text


@pytest.mark.parametrize(
    "command", [["chat"], ["generate"], ["bench", "offline"], ["bench", "serve"], ["replay"], ["check"]]
)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args([*command, "--help"])
    assert stopped.value.code == 0
    assert "usage: aserve" in capsys.readouterr().out
