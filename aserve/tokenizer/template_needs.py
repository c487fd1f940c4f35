"""What chats need lest a template drops or refuses a part of them, told by small chats that are rendered once.

A template that takes one system message, at the beginning, or one call a turn, refuses others or drops them without a
word. What is refused is tried in other forms (``chat_template``); what would be dropped has to be known before. Some
refuse tools without a description, which clients may leave out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aserve.errors import ClientError
from aserve.tokenizer.messages import (
    give_late_system_messages_to_user,
    join_leading_system_messages,
    split_parallel_calls,
)

Messages = list[dict[str, Any]]
Tools = Sequence[Any] | None
Change = Callable[[Messages], Messages]
Render = Callable[[Messages, Tools], str]

FIRST, SECOND = "first-probe", "second-probe"
USER: dict[str, Any] = {"role": "user", "content": "hi"}


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """The changes that make a chat fit for one template."""

    changes: tuple[Change, ...]
    wants_descriptions: bool

    @classmethod
    def find(cls, render: Render, *, leading_roles: tuple[str, str]) -> "TemplateNeeds":
        """Return what chats need that ``render`` makes prompts of; one may begin with the ``leading_roles``."""
        leading = [{"role": role, "content": text} for role, text in zip(leading_roles, (FIRST, SECOND), strict=True)]
        calls = [_call(text) for text in (FIRST, SECOND)]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]
        calling = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
        bare = [_tool({"type": "integer"})]
        described = describe_tools(bare)
        second = {"role": leading_roles[1], "content": SECOND}
        late = [{**USER, "content": FIRST}, {"role": "assistant", "content": "hi"}, second, USER]
        chats: tuple[tuple[Messages, Tools, Change], ...] = (
            ([*leading, USER], None, join_leading_system_messages),
            (late, None, give_late_system_messages_to_user),
            (calling, described, split_parallel_calls),
        )
        changes = tuple(change for messages, tools, change in chats if _drops_second(_try(render, messages, tools)))
        wants_descriptions = _try(render, [USER], bare) is None and _try(render, [USER], described) is not None
        return cls(changes, wants_descriptions)

    def fit(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        """Return a chat as its template needs it."""
        for change in self.changes:
            messages = change(messages)
        return messages, describe_tools(tools) if tools and self.wants_descriptions else tools


def describe_tools(tools: Sequence[Any]) -> list[Any]:
    """Return ``tools`` with an empty description for functions and parameters that have none."""
    return [_describe_tool(tool) for tool in tools]


def _describe_tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if isinstance(parameters, Mapping) and isinstance(properties, Mapping):
        described = {name: _describe(schema) for name, schema in properties.items()}
        function = {**function, "parameters": {**parameters, "properties": described}}
    return {**tool, "function": _describe(function)}


def _describe(value: Any) -> Any:
    return {**value, "description": value.get("description") or ""} if isinstance(value, Mapping) else value


def _tool(schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def _call(text: str) -> dict[str, Any]:
    return {"id": text, "type": "function", "function": {"name": "f", "arguments": {"x": text}}}


def _try(render: Render, messages: Messages, tools: Tools) -> str | None:
    """Return the prompt, None if the template refuses the chat."""
    try:
        return render(messages, tools)
    except ClientError:
        return None


def _drops_second(text: str | None) -> bool:
    return text is not None and FIRST in text and SECOND not in text
