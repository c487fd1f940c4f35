"""Tools for chat templates that know nothing of them: described in the system message, calls and results as text.

The format is Hermes': a call is a JSON object between ``<tool_call>`` tags, a result stands between
``<tool_response>`` tags in a message of the user.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from aserve.errors import ClientError

INSTRUCTIONS = """You can call functions. Here is each of them as a JSON object, between <tools> tags:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object between <tool_call> tags, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
Results will be given to you between <tool_response> tags. If no function is needed, answer in plain words."""


def spell_out_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return normalised ``messages`` that any template can render, with ``tools`` described at their beginning."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        is_result = message["role"] == "tool"
        spelled = _result_message(message) if is_result else _without_calls(message)
        if is_result and plain and plain[-1].get("is_result"):
            plain[-1]["content"] += "\n" + spelled["content"]
        else:
            plain.append({**spelled, "is_result": is_result})
    for message in plain:
        del message["is_result"]
    return _with_instructions(plain, tools) if tools else plain


def _with_instructions(messages: list[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    instructions = INSTRUCTIONS.format(tools="\n".join(_json(tool) for tool in tools))
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": instructions}, *messages]
    separator = "\n\n" if first["content"] else ""
    return [{**first, "content": first["content"] + separator + instructions}, *messages[1:]]


def _result_message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``message`` with its calls written out behind its content."""
    texts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        texts.append(f"<tool_call>\n{_written(function)}\n</tool_call>")
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": "\n".join(texts)}


def _written(function: Mapping[str, Any]) -> str:
    """Return a call with the spaces that models put there, so that what one wrote need not be computed again."""
    try:
        return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    except RecursionError:
        raise ClientError("the arguments of a call are nested too deeply", param="messages") from None


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
