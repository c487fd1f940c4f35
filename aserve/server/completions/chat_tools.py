"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat completion; no I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

from aserve.errors import ClientError
from aserve.server.tool_choice import read_choice
from aserve.server.tools import FunctionTool, ToolOptions, check_function, check_tools


def read_tools(tools: Sequence[Any]) -> tuple[FunctionTool, ...]:
    """Return the functions of ``tools``; raise ClientError that names the field at fault."""
    return check_tools(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))


def read_tool_options(tools: Sequence[Any], tool_choice: Any, *, is_parallel: bool) -> ToolOptions:
    """Return what the three fields say; ``tool_choice`` None is the API's default."""
    functions = read_tools(tools)
    return read_choice(tool_choice, functions, _chosen_name, is_parallel=is_parallel, holder="allowed_tools")


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


def _chosen_name(choice: Mapping[str, Any], where: str) -> str:
    """Return the name within ``{"type": "function", "function": {"name": ...}}``."""
    if choice.get("type") != "function":
        raise ClientError(f"{where} must be a function", param=where)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ClientError(f"{where}.function must have a name", param=f"{where}.function.name")
    return name
