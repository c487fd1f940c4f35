"""The ``aserve`` command: flags come from config.py, each subcommand's work is in its own module.

Modules of subcommands are imported when they run, so that ``--help`` and errors in flags answer at once.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from aserve import __version__
from aserve.config import Config, load_config, setting_fields
from aserve.errors import AserveError
from aserve.log import configure_logging

API_KEY_VARIABLE = "ASERVE_API_KEY"
CONFIG_VARIABLE = "ASERVE_CONFIG"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 done, 1 failed, 2 wrong usage or setting."""
    arguments = build_parser().parse_args(argv)
    try:
        config = read_config(arguments)
        configure_logging(getattr(arguments, "command_log_level", config.server.log_level))
        command = import_module(f"aserve.{arguments.module}")
        return int(command.run(arguments, config))
    except AserveError as error:
        print(f"aserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def read_config(arguments: argparse.Namespace) -> Config:
    """Merge defaults, the ``--config`` file, the environment's key and the flags that were given."""
    given = vars(arguments)
    overrides: dict[str, dict[str, Any]] = {"engine": {}, "server": {}}
    if key := os.environ.get(API_KEY_VARIABLE):
        overrides["server"]["api_key"] = key
    for section, values in overrides.items():
        values.update({s.name: given[s.name] for s, _ in setting_fields(section) if s.name in given})
    return load_config(given.get("config") or os.environ.get(CONFIG_VARIABLE), overrides)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with all subcommands, defaults and units included in the help."""
    parser = argparse.ArgumentParser(prog="aserve", description="Serve a large language model from one event loop.")
    parser.add_argument("--version", action="version", version=f"aserve {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = _command(commands, "serve", "commands.serve", "serve a model over HTTP, SSE and WebSocket")
    _add_settings(serve, "engine", with_model=True)
    _add_settings(serve, "server")

    chat = _command(commands, "chat", "commands.chat", "talk to a model in this terminal")
    _add_settings(chat, "engine", with_model=True)
    chat.add_argument("--system", help="system prompt")
    _add_sampling(chat)
    _add_log_level(chat)

    generate = _command(
        commands, "generate", "commands.generate", "complete prompts from a JSONL file or the command line"
    )
    _add_settings(generate, "engine", with_model=True)
    generate.add_argument("--prompt", action="append", default=[], help="a prompt; may be given several times")
    generate.add_argument(
        "--input", help="JSONL file, '-' for standard input; a line has 'prompt' (text or token ids) or 'messages'"
    )
    generate.add_argument("--output", default="-", help="JSONL file, '-' for standard output (default: -)")
    _add_sampling(generate)
    _add_log_level(generate)

    _add_bench(commands)

    replay = _command(commands, "replay", "commands.replay", "run a recorded step trace through the scheduler again")
    replay.add_argument("file", help="trace file")

    check = _command(commands, "check", "commands.check", "print what this machine offers: devices, backends, versions")
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_log_level(check)
    return parser


def _add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add the flag of commands that talk to a person, who should see results and trouble only."""
    parser.add_argument(
        "--log-level", dest="command_log_level", choices=("debug", "info", "warning", "error"), default="warning",
        help="log level (default: warning)",
    )  # fmt: skip


def _command(commands: Any, name: str, module: str, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.set_defaults(module=module)
    return parser


def _add_settings(parser: argparse.ArgumentParser, section: str, with_model: bool = False) -> None:
    """Add a flag for each setting of a section; flags that are not given leave no trace in the namespace."""
    if section == "engine":
        parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings; also {CONFIG_VARIABLE}")
    group = parser.add_argument_group(f"{section} settings")
    for setting, hint in setting_fields(section):
        text = f"{setting.metadata['help']}{_default_text(setting.default)}"
        if setting.name == "model" and with_model:
            either = parser.add_mutually_exclusive_group()
            either.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=text)
            either.add_argument("--model", dest="model", default=argparse.SUPPRESS, metavar="MODEL", help="the same")
            continue
        flag = f"--{setting.name.replace('_', '-')}"
        group.add_argument(
            flag, dest=setting.name, default=argparse.SUPPRESS, help=text, **_flag_kind(setting.name, hint)
        )


def _default_text(default: Any) -> str:
    if default is None or default == ():
        return ""
    text = {True: "on", False: "off"}.get(default, str(default)) if isinstance(default, bool) else str(default)
    return f" (default: {text})"


def _flag_kind(name: str, hint: Any) -> Mapping[str, Any]:
    if get_origin(hint) in (Union, UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {"nargs": "*", "metavar": "VALUE"}
    return {"type": hint, "metavar": {int: "N", float: "X"}.get(hint, "TEXT")}


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate (default: rest of the context)")
    group.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0 is greedy (default: 1.0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="nucleus (default: 1.0)")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="most likely tokens kept; 0: all (default: 0)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="X", help="least share of the best (default: 0.0)")
    group.add_argument("--seed", type=int, metavar="N", help="seed (default: fresh entropy)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure speed", description="Measure speed.")
    kinds = bench.add_subparsers(title="kinds", required=True, metavar="KIND")

    offline = _command(kinds, "offline", "bench.offline", "measure tokens per second of the engine without a server")
    _add_settings(offline, "engine", with_model=True)
    offline.add_argument("--num-prompts", type=int, default=32, metavar="N", help="requests (default: 32)")
    _add_lengths(offline)

    serve = _command(kinds, "serve", "bench.serving", "measure latency and throughput of a running server")
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="server (default: http://127.0.0.1:8000)")
    serve.add_argument("--api-key", dest="key", help=f"key to send; also {API_KEY_VARIABLE}")
    serve.add_argument(
        "--transport", choices=("sse", "websocket"), default="sse",
        help="chat completions over SSE or responses over a WebSocket (default: sse)",
    )  # fmt: skip
    serve.add_argument("--num-prompts", type=int, default=64, metavar="N", help="requests (default: 64)")
    serve.add_argument(
        "--concurrency", type=int, default=8, metavar="N", help="requests at a time, closed loop (default: 8)"
    )
    serve.add_argument(
        "--rate", type=float, metavar="X", help="requests per second, open loop (Poisson), instead of --concurrency"
    )
    serve.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="X",
        help="seconds until a request counts as failed (default: 600)",
    )
    serve.add_argument("--goodput-ttft-ms", type=float, metavar="X", help="time to first token that counts as good, ms")
    serve.add_argument(
        "--goodput-tpot-ms", type=float, metavar="X", help="time per output token that counts as good, ms"
    )
    _add_lengths(serve)


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="prompt tokens, about (default: 128)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="output tokens (default: 128)")
    parser.add_argument("--workload-seed", type=int, default=0, metavar="N", help="seed of the workload (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
