"""Flags for the settings of config.py, for every subcommand that takes them; nothing heavy is imported."""

import argparse
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from aserve.config import setting_fields

CONFIG_VARIABLE = "ASERVE_CONFIG"


def add_command(commands: Any, name: str, module: str, help: str) -> argparse.ArgumentParser:
    """Add a subcommand whose ``run`` is in ``aserve.<module>``."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.set_defaults(module=module)
    return parser


def add_settings(parser: argparse.ArgumentParser, section: str, with_model: bool = False) -> None:
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
