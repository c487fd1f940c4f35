"""The functions that an answer may call, checked; the same for chat completions, responses and messages. No I/O."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from aserve.errors import ClientError
from aserve.structured.text_form import TextForm

MAX_TOOLS = 512
MAX_NAME_CHARS = 128
NAME = re.compile(r"[\w.:/-]+", re.ASCII)
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
OPEN_FORMS = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "if")  # may name further properties

ToolChoice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """One function. ``parameters`` is the JSON schema of its arguments; calls are held to it if ``is_strict``.

    ``text_form`` is that of its only argument, if that is a text in a form of its own.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    is_strict: bool
    text_form: TextForm | None = None

    def enforced_schema(self) -> dict[str, Any]:
        """Return the schema that a grammar holds calls to: that of an object, whether it says so or not.

        Arguments that it does not name are not written unless it asks for them: nobody waits for any, and a model
        that may make them up does not stop.
        """
        schema = dict(self.parameters)
        if any(form in schema for form in OPEN_FORMS):
            return schema
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        return {"type": "object", **schema}

    def template_form(self) -> dict[str, Any]:
        """Return what chat templates know as a tool."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.parameters)}}


def check_function(
    where: str, *, name: Any, description: Any = None, parameters: Any = None, strict: Any = None
) -> FunctionTool:
    """Return the function that a client describes at ``where``; raise ClientError that names the field at fault.

    None stands for what the client left out: there is no description, there are no parameters, and it is not strict.
    """
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not NAME.fullmatch(name):
        raise ClientError(
            f"{where}.name must be 1 to {MAX_NAME_CHARS} letters, digits or any of _ - . : /", param=f"{where}.name"
        )
    if description is not None and not isinstance(description, str):
        raise ClientError(f"{where}.description must be a string", param=f"{where}.description")
    if strict is not None and not isinstance(strict, bool):
        raise ClientError(f"{where}.strict must be true or false", param=f"{where}.strict")
    if parameters is None:
        parameters = NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise ClientError(f"{where}.parameters must be a JSON schema", param=f"{where}.parameters")
    try:
        orjson.dumps([description, parameters])
    except TypeError:
        raise ClientError(f"{where} is nested too deeply or holds a lone surrogate", param=where) from None
    return FunctionTool(name, description, parameters, strict is True)


def check_tools(tools: Iterable[FunctionTool]) -> tuple[FunctionTool, ...]:
    """Return ``tools``; raise ClientError if there are too many or two of one name."""
    checked = tuple(tools)
    if len(checked) > MAX_TOOLS:
        raise ClientError(f"tools has more than {MAX_TOOLS} entries", param="tools")
    names: set[str] = set()
    for tool in checked:
        if tool.name in names:
            raise ClientError(f"tools has two functions named {tool.name}", param="tools")
        names.add(tool.name)
    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The tools of one request and how they may be used.

    ``allowed`` narrows the choice to these names (a function that must be called: "required" and its name). Raises
    ClientError with ``param`` "tool_choice" for a choice that the tools do not leave.
    """

    tools: tuple[FunctionTool, ...] = ()
    choice: ToolChoice = "auto"
    allowed: Collection[str] | None = None
    is_parallel: bool = True

    def __post_init__(self) -> None:
        names = {tool.name for tool in self.tools}
        if missing := sorted(set(self.allowed or ()) - names):
            raise ClientError(f"tool_choice names {missing[0][:64]!r}, which is not in tools", param="tool_choice")
        if self.choice == "required" and not self.callable:
            raise ClientError("tool_choice asks for a call, but there are no tools", param="tool_choice")

    @property
    def callable(self) -> tuple[FunctionTool, ...]:
        """The functions that the answer may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    def for_template(self) -> list[dict[str, Any]] | None:
        """Return the tools that the model is told of, None for none.

        Where a call is required, a grammar keeps to the allowed ones: all are told, so that turns share a prefix.
        """
        shown = self.tools if self.choice == "required" else self.callable
        return [tool.template_form() for tool in shown] or None


NO_TOOLS = ToolOptions()
