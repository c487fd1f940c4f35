"""Tools, choices, reasoning and items of any JSON: taken, or refused as the client's error with a name."""

from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionFunctionToolParam
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from aserve.errors import ClientError
from aserve.server.responses.item_ids import ItemPlace
from aserve.server.responses.items import BuiltInCallItem, BuiltInOutputItem, decode_items, encode_items
from aserve.server.responses.listing import wire_item
from aserve.server.responses.schema import ResponseRequest, parse_create
from aserve.server.responses.turns import chat_messages

WORDS = [
    "function", "custom", "namespace", "web_search", "allowed_tools", "grammar", "lark", "object", "required", "auto",
    "none", "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "reasoning", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
    "apply_patch_call_output", "tool_search_call", "tool_search_output", "input_text", "output_text", "user",
    "assistant", "aserve1.aGk=", "aserve1.!!",
]  # fmt: skip
KEYS = [
    "type", "name", "namespace", "description", "parameters", "strict", "format", "syntax", "definition", "tools",
    "mode", "call_id", "id", "arguments", "input", "output", "action", "operation", "status", "content", "summary",
    "encrypted_content", "text", "role", "effort",
]  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(WORDS) | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=8,
)
OBJECTS = st.builds(
    lambda kind, fields: {**fields, "type": kind},
    st.sampled_from(WORDS),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6),
)
MANY = VALUES | st.lists(OBJECTS, max_size=4)


def parse(body: dict[str, Any]) -> ResponseRequest | ClientError:
    try:
        return parse_create(body, 256)
    except ClientError as error:
        return error


def check(body: dict[str, Any]) -> None:
    """Parse ``body``; what was taken can be rendered, listed and stored."""
    request = parse(body)
    if isinstance(request, ClientError):
        assert request.status == 400
        assert request.param is not None
        assert request.param.partition(".")[0].partition("[")[0] in body
        return
    for tool in request.tools.options.for_template() or ():
        TypeAdapter(ChatCompletionFunctionToolParam).validate_python(tool)
    assert orjson.loads(request.tools.shown) == [
        tool for tool in body.get("tools") or () if tool["type"] in ("function", "custom", "namespace")
    ]
    orjson.dumps(chat_messages(request.items))
    assert decode_items(encode_items(request.items)) == request.items
    for index, item in enumerate(request.items):
        shown = wire_item(item, ItemPlace("resp_1", False, index))
        if not isinstance(item, BuiltInCallItem | BuiltInOutputItem):  # these are shown as they came
            TypeAdapter(ResponseItem).validate_python(shown)


@settings(max_examples=100, deadline=None)
@given(MANY, VALUES | OBJECTS, VALUES)
def test_any_tools_and_choice(tools: Any, choice: Any, parallel: Any) -> None:
    check({"input": "a", "tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel})
    check({"input": "a", "tools": tools})


@settings(max_examples=100, deadline=None)
@given(MANY, VALUES | OBJECTS)
def test_any_items_and_reasoning(items: Any, reasoning: Any) -> None:
    check({"input": items})
    check({"input": "a", "reasoning": reasoning})
