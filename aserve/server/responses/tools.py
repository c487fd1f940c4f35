"""``tools`` and ``tool_choice`` of a response.

To the model a custom tool, which takes free text, is a function of one string, and the tools of a namespace carry its
name in front of theirs. Tools of other types are those that OpenAI's servers run: they are left out, with a line in
the log.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from aserve.errors import ClientError, quoted
from aserve.server.errors import type_error
from aserve.server.responses.input import unsupported
from aserve.server.responses.turns import CUSTOM_INPUT, function_name
from aserve.server.tool_choice import read_choice
from aserve.server.tools import NO_TOOLS, FunctionTool, ToolOptions, check_function, check_tools
from aserve.structured.text_form import TextForm

logger = logging.getLogger(__name__)

TYPES = ("function", "custom", "namespace")

CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "the input, as plain text"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ToolName:
    """How the client knows a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of one request; ``shown`` and ``shown_choice`` are the JSON by which its response repeats them."""

    options: ToolOptions = NO_TOOLS
    names: Mapping[str, ToolName] = field(default_factory=dict)  # by the name that the model knows
    shown: bytes = b"[]"
    shown_choice: bytes = b'"auto"'

    def name_of(self, function: str) -> ToolName:
        """Return the client's name of what the model calls ``function``."""
        return self.names.get(function) or ToolName(function)


def read_tools(tools: object, choice: object, *, is_parallel: bool) -> ResponseTools:
    """Return the fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``; raise ClientError for what is wrong."""
    tools = [] if tools is None else tools
    if not isinstance(tools, list):
        raise type_error("tools", "list", tools)
    found = [list(_read_tool(f"tools[{place}]", tool, None)) for place, tool in enumerate(tools)]
    functions = check_tools(function for group in found for function, _ in group)
    names = {function.name: name for group in found for function, name in group}
    options = read_choice(choice, functions, partial(_chosen_name, names), is_parallel=is_parallel)
    shown = [tool for tool in tools if tool["type"] in TYPES]
    if num_ignored := len(tools) - len(shown):
        logger.info("left out %d tools of types that only OpenAI's servers can run", num_ignored)
    return ResponseTools(options, names, _json("tools", shown), _json("tool_choice", choice or "auto"))


def _read_tool(where: str, tool: object, namespace: str | None) -> Iterator[tuple[FunctionTool, ToolName]]:
    """Yield the functions that a tool is to the model."""
    if not isinstance(tool, dict):
        raise type_error(where, "object", tool)
    kind = tool.get("type")
    if kind == "function":
        yield _read_function(where, tool, namespace), ToolName(tool["name"], namespace)
    elif kind == "custom":
        yield _read_custom(where, tool, namespace), ToolName(tool["name"], namespace, is_custom=True)
    elif kind == "namespace" and namespace is None:
        members, label = tool.get("tools"), _read_name(where, tool)
        if not isinstance(members, list):
            raise type_error(f"{where}.tools", "list", members)
        for place, member in enumerate(members):
            yield from _read_tool(f"{where}.tools[{place}]", member, label)
    elif not isinstance(kind, str):
        raise type_error(f"{where}.type", "string", kind)


def _read_function(where: str, tool: Mapping[str, Any], namespace: str | None) -> FunctionTool:
    said = {key: tool.get(key) for key in ("description", "parameters", "strict")}
    return check_function(where, name=function_name(_read_name(where, tool), namespace), **said)


def _read_custom(where: str, tool: Mapping[str, Any], namespace: str | None) -> FunctionTool:
    """Return the function of one string; a grammar of that string is told to the model, too."""
    description, form = tool.get("description"), _read_form(f"{where}.format", tool.get("format"))
    if form is not None:
        rule = f"The input has to match this {form.syntax} grammar:\n{form.definition}"
        description = rule if description is None else f"{description}\n\n{rule}"
    name = function_name(_read_name(where, tool), namespace)
    function = check_function(where, name=name, description=description, parameters=CUSTOM_PARAMETERS)
    return function if form is None else replace(function, is_strict=True, text_form=form)


def _read_form(where: str, form: Any) -> TextForm | None:
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return None
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str) or not definition:
        raise ClientError(f"{where} must have the syntax lark or regex and a definition", param=where)
    return TextForm(syntax, definition, CUSTOM_INPUT)


def _read_name(where: str, tool: Mapping[str, Any]) -> str:
    value = tool.get("name")
    if not isinstance(value, str) or not value:
        raise type_error(f"{where}.name", "string", value)
    return value


def _chosen_name(names: Mapping[str, ToolName], choice: Mapping[str, Any], where: str) -> str:
    """Return the name that the model knows of a tool that is chosen by its type and name."""
    kind = choice.get("type")
    if kind not in ("function", "custom"):
        raise unsupported(where, f"{where} of type {quoted(kind)}")
    wanted = _read_name(where, choice)
    for function, tool in names.items():
        if wanted in (function, tool.name) and tool.is_custom is (kind == "custom"):
            return function
    raise ClientError(f"{where} names {wanted[:64]!r}, which is not in tools", param=where)


def _json(where: str, value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        raise ClientError(f"{where} is nested too deeply or holds a lone surrogate", param=where) from None
