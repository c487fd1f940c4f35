"""Settings: precedence, strictness and the examples that are shipped."""

import math
from pathlib import Path
from typing import Any

import pytest

from aserve.cli import build_parser, main, read_config
from aserve.config import Config, EngineConfig, ServerConfig, load_config, setting_fields
from aserve.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def config_of(*argv: str) -> Config:
    return read_config(build_parser().parse_args(argv))


def test_defaults_listen_on_loopback_only() -> None:
    config = Config()
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert config.engine.page_size is None


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
        ("engine = 3", "[engine] must be a table"),
        ("[engine]\nmax_num_seq = 3", "did you mean max_num_seqs?"),
        ("[engine]\npage-size = 3", "did you mean page_size?"),
        ("[engine]\nzebra = 3", "known: model, "),
        ("[engine]\nspeculation = 'draft'", "engine.speculation must be one of none, ngram"),
        ("[engine]\nnum_speculative_tokens = 1", "engine.num_speculative_tokens must be between 2 and 64"),
        ("[engine]\nngram_min = 5", "engine.ngram_min must be at most ngram_max (4), got 5"),
        ("[engine]\nngram_max = 1", "engine.ngram_min must be at most ngram_max (1), got 2"),
        ("[sever]\nport = 3", "did you mean server?"),
        ("page_size = 3", "it belongs in [engine]"),
        ("port = 3", "it belongs in [server]"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (EngineConfig, "page_size", 0), (EngineConfig, "page_size", 16.0), (EngineConfig, "prefix_cache", None),
        (EngineConfig, "kv_memory_gib", math.inf), (EngineConfig, "kv_memory_gib", math.nan),
        (EngineConfig, "kv_memory_gib", 10**400), (EngineConfig, "kv_memory_fraction", 1.5),
        (EngineConfig, "trace_steps", 0), (EngineConfig, "num_threads", -1), (EngineConfig, "device", "tpu"),
        (EngineConfig, "overlap", 1), (EngineConfig, "model", 5), (EngineConfig, "max_num_seqs", True),
        (ServerConfig, "keep_alive_s", -1), (ServerConfig, "drain_timeout_s", -1.0), (ServerConfig, "port", 65536),
        (ServerConfig, "stall_timeout_s", math.inf), (ServerConfig, "allowed_origins", "*"),
    ],
)  # fmt: skip
def test_code_meets_the_same_checks_as_a_file(cls: Any, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(engine|server)\.{key} must "):
        cls(**{key: value})


def test_values_are_stored_in_their_own_type() -> None:
    assert isinstance(EngineConfig(kv_memory_gib=1).kv_memory_gib, float)
    assert ServerConfig(allowed_origins=["a"]).allowed_origins == ("a",)  # type: ignore[arg-type]
    assert EngineConfig(model=Path("a/b")).model == "a/b"  # type: ignore[arg-type]
    assert (ServerConfig(keep_alive_s=0).keep_alive_s, ServerConfig(drain_timeout_s=0).drain_timeout_s) == (0.0, 0.0)


def test_the_command_line_reports_a_wrong_setting_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/no/such/file.toml"]) == 2
    assert "/no/such/file.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["serve", "--prot", "9"], "aserve serve: error: unknown flag --prot; did you mean --port?"),
        (["serve", "--max-model-length=9"], "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["serve", "--max_num_seqs", "9"], "unknown flag --max_num_seqs; did you mean --max-num-seqs?"),
        (["generate", "--temprature", "0"], "unknown flag --temprature; did you mean --temperature?"),
        (["bench", "serve", "--concurency", "9"], "aserve bench serve: error: unknown flag --concurency; did you"),
        (["serve", "--zebra"], "aserve serve: error: unknown flag --zebra\n"),
        (["serve", "a", "b"], "aserve serve: error: unexpected argument 'b'\n"),
        (["srve"], "invalid choice: 'srve' (choose from "),
    ],
)
def test_a_mistyped_flag_is_answered_in_two_lines_with_what_was_meant(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 2
    assert "--help`" in message


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
    "command",
    [["chat"], ["generate"], ["bench", "offline"], ["bench", "serve"], ["bench", "kernels"], ["replay"], ["check"]],
)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args([*command, "--help"])
    assert stopped.value.code == 0
    assert "usage: aserve" in capsys.readouterr().out
