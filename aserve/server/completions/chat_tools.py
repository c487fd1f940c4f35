"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat completion; no I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

from aserve.errors import ClientError, quoted
from aserve.server.tools import FunctionTool, ToolOptions, check_function, check_tools

MODES = ("none", "auto", "required")


def read_tools(tools: Sequence[Any]) -> tuple[FunctionTool, ...]:
    """Return the functions of ``tools``; raise ClientError that names the field at fault."""
    return check_tools(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))


def read_tool_options(tools: Sequence[Any], tool_choice: Any, *, is_parallel: bool) -> ToolOptions:
    """Return what the three fields say; ``tool_choice`` None is the API's default."""
    functions = read_tools(tools)
    if tool_choice is None or isinstance(tool_choice, str):
        choice, allowed = _read_mode(tool_choice or "auto", "tool_choice"), None
    elif isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        choice, allowed = "required", {_read_name(tool_choice, "tool_choice")}
    elif isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        choice, allowed = _read_allowed(tool_choice.get("allowed_tools"), "tool_choice.allowed_tools")
    else:
        raise ClientError(
            f"tool_choice must be one of {', '.join(MODES)}, a function or allowed_tools", param="tool_choice"
        )
    return ToolOptions(tools=functions, choice=choice, allowed=allowed, is_parallel=is_parallel)


def _read_tool(tool: Any, where: str) -> FunctionTool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        shown = f"{kind[:64]!r}" if isinstance(kind, str) else "none"
        raise ClientError(
            f"{where}.type must be 'function', got {shown}", param=f"{where}.type", code="unsupported_parameter"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ClientError(f"{where}.function must be an object", param=f"{where}.function")
    return check_function(
        f"{where}.function",
        name=function.get("name"),
        description=function.get("description"),
        parameters=function.get("parameters"),
        strict=function.get("strict"),
    )


def _read_mode(mode: Any, where: str) -> Any:
    if mode not in MODES:
        raise ClientError(f"{where} must be one of {', '.join(MODES)}, got {quoted(mode)}", param=where)
    return mode


def _read_name(value: Any, where: str) -> str:
    """Return the name within ``{"type": "function", "function": {"name": ...}}``."""
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ClientError(f"{where}.function must have a name", param=f"{where}.function.name")
    return name


def _read_allowed(value: Any, where: str) -> tuple[Any, set[str]]:
    tools = value.get("tools") if isinstance(value, Mapping) else None
    if not isinstance(tools, list):
        raise ClientError(f"{where} must have a mode and a list of tools", param=where)
    names = {_read_name(tool, f"{where}.tools[{index}]") for index, tool in enumerate(tools)}
    return _read_mode(value.get("mode"), f"{where}.mode"), names
