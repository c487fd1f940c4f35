"""The ``aserve`` command: flags come from config.py, each subcommand's work is in its own module.

Modules of subcommands are imported when they run, so that ``--help`` and errors in flags answer at once.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from aserve import __version__
from aserve.bench.flags import add_bench
from aserve.config import API_KEY_VARIABLE, Config, load_config, setting_fields
from aserve.errors import AserveError
from aserve.flag_parser import FlagParser
from aserve.flags import CONFIG_VARIABLE, add_command, add_settings
from aserve.log import configure_logging


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
    parser = FlagParser(prog="aserve", description="Serve a large language model from one event loop.")
    parser.add_argument("--version", action="version", version=f"aserve {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = add_command(commands, "serve", "commands.serve", "serve a model over HTTP, SSE and WebSocket")
    add_settings(serve, "engine", with_model=True)
    add_settings(serve, "server")

    chat = add_command(commands, "chat", "commands.chat", "talk to a model in this terminal")
    add_settings(chat, "engine", with_model=True)
    chat.add_argument("--system", help="system prompt")
    _add_sampling(chat)
    _add_log_level(chat)

    generate = add_command(
        commands, "generate", "commands.generate", "complete prompts from a JSONL file or the command line"
    )
    add_settings(generate, "engine", with_model=True)
    generate.add_argument("--prompt", action="append", default=[], help="a prompt; may be given several times")
    generate.add_argument(
        "--input", help="JSONL file, '-' for standard input; a line has 'prompt' (text or token ids) or 'messages'"
    )
    generate.add_argument("--output", default="-", help="JSONL file, '-' for standard output (default: -)")
    _add_sampling(generate)
    _add_log_level(generate)

    add_bench(commands)

    replay = add_command(commands, "replay", "commands.replay", "run a recorded step trace through the scheduler again")
    replay.add_argument("file", help="trace file")

    check = add_command(
        commands,
        "check",
        "commands.check",
        "print what this machine offers: devices, backends, versions; with a model, also what of it serves the model",
    )
    add_settings(check, "engine", with_model=True)
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    check.add_argument(
        "--gpu", type=_gpu, metavar="X.Y[:NAME]",
        help="say which cake variants a GPU of this compute capability runs, such as '9.0:NVIDIA H200'; "
        "default: the one here",
    )  # fmt: skip
    _add_log_level(check)
    return parser


def _gpu(text: str) -> tuple[str, tuple[int, int]]:
    """Read a compute capability and perhaps a name; return the name first."""
    capability, _, name = text.partition(":")
    if not re.fullmatch(r"\d+\.\d", capability):
        raise argparse.ArgumentTypeError(f"must be like 9.0 or '9.0:NVIDIA H200', got {text!r}")
    major, minor = capability.split(".")
    return name, (int(major), int(minor))


def _add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add the flag of commands that talk to a person, who should see results and trouble only."""
    parser.add_argument(
        "--log-level", dest="command_log_level", choices=("debug", "info", "warning", "error"), default="warning",
        help="log level (default: warning)",
    )  # fmt: skip


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
