"""``tools`` and ``tool_choice`` of /v1/messages; no I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

from aserve.errors import ClientError
from aserve.server.tools import FunctionTool, ToolChoice, ToolOptions, check_function, check_tools

CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def read_tool_options(tools: Sequence[Any], tool_choice: Mapping[str, Any] | None) -> ToolOptions:
    """Return what the two fields say; raise ClientError that names the field at fault."""
    functions = check_tools(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    if tool_choice is None:
        return ToolOptions(tools=functions)
    kind = tool_choice.get("type")
    if not isinstance(kind, str) or kind not in CHOICES:
        raise ClientError(f"tool_choice.type must be one of {', '.join(CHOICES)}", param="tool_choice.type")
    is_single = tool_choice.get("disable_parallel_tool_use")
    if is_single is not None and not isinstance(is_single, bool):
        name = "tool_choice.disable_parallel_tool_use"
        raise ClientError(f"{name} must be true or false", param=name)
    allowed = {_read_name(tool_choice)} if kind == "tool" else None
    return ToolOptions(tools=functions, choice=CHOICES[kind], allowed=allowed, is_parallel=not is_single)


def _read_tool(tool: Any, where: str) -> FunctionTool:
    if not isinstance(tool, Mapping):
        raise ClientError(f"{where} must be an object", param=where)
    kind = tool.get("type")
    if kind not in (None, "custom"):  # those of a hosted service, or that its models know without a schema
        shown = repr(kind[:64]) if isinstance(kind, str) else "none"
        raise ClientError(
            f"{where}.type must be 'custom' or left out, got {shown}",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise ClientError(f"{where}.input_schema must be a JSON schema", param=f"{where}.input_schema")
    return check_function(
        where,
        name=tool.get("name"),
        description=tool.get("description"),
        parameters=schema,
        strict=tool.get("strict"),
    )


def _read_name(tool_choice: Mapping[str, Any]) -> str:
    name = tool_choice.get("name")
    if not isinstance(name, str):
        raise ClientError("tool_choice.name must be a string", param="tool_choice.name")
    return name
