"""``tool_choice`` of chat completions and responses, which say the same in different places; no I/O."""

from collections.abc import Callable, Mapping
from typing import Any

from aserve.errors import ClientError, quoted
from aserve.server.errors import type_error
from aserve.server.tools import MAX_TOOLS, FunctionTool, ToolChoice, ToolOptions

MODES: tuple[ToolChoice, ...] = ("none", "auto", "required")
MODES_OF_ALLOWED: tuple[ToolChoice, ...] = ("auto", "required")

NameOf = Callable[[Mapping[str, Any], str], str]
"""Returns the name that the model knows of the tool that is chosen at a place; raises ClientError that names it."""


def read_choice(
    choice: object, tools: tuple[FunctionTool, ...], name_of: NameOf, *, is_parallel: bool, holder: str = ""
) -> ToolOptions:
    """Return how ``tools`` may be used; ``choice`` None leaves that to the model.

    ``holder`` is the member of an "allowed_tools" that its mode and tools stand in, if they do not stand beside the
    type. Raises ClientError that names the field at fault.
    """
    mode: ToolChoice = "required"
    allowed: set[str] | None = None
    if choice is None or isinstance(choice, str):
        mode = _read_mode("tool_choice", choice, MODES)
    elif not isinstance(choice, Mapping):
        raise type_error("tool_choice", "string or object", choice)
    elif choice.get("type") == "allowed_tools":
        mode, allowed = _read_allowed(choice, name_of, holder)
    else:
        allowed = {name_of(choice, "tool_choice")}
    return ToolOptions(tools=tools, choice=mode, allowed=allowed, is_parallel=is_parallel)


def _read_allowed(choice: Mapping[str, Any], name_of: NameOf, holder: str) -> tuple[ToolChoice, set[str]]:
    where = f"tool_choice.{holder}" if holder else "tool_choice"
    said = choice.get(holder) if holder else choice
    if not isinstance(said, Mapping):
        raise type_error(where, "object", said)
    mode, tools = _read_mode(f"{where}.mode", said.get("mode"), MODES_OF_ALLOWED), said.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise type_error(f"{where}.tools", "list of objects", tools)
    if len(tools) > MAX_TOOLS:
        raise ClientError(f"{where}.tools has more than {MAX_TOOLS} entries", param=f"{where}.tools")
    return mode, {name_of(tool, f"{where}.tools[{place}]") for place, tool in enumerate(tools)}


def _read_mode(where: str, value: object, modes: tuple[ToolChoice, ...]) -> ToolChoice:
    for mode in modes:
        if value == mode:
            return mode
    if value is None:
        return "auto"
    raise ClientError(f"{where} must be one of {', '.join(modes)}, got {quoted(value)}", param=where)
