"""Structured output in responses: the demo model itself is held to a schema, over HTTP and over the WebSocket."""

import json
import re
from typing import Any

import openai
import pytest
from doubles_responses import official
from doubles_socket import in_loop, live_server, respond, text_of
from doubles_tuning import make_engine

from aserve.config import EngineConfig
from aserve.request import GrammarSpec
from aserve.server.responses.schema import parse_create
from aserve.server.structured_request import grammar_from

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "name": "person", "strict": True, "schema": SCHEMA}


def test_formats_mean_what_they_mean_in_chat() -> None:
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}
    assert parse_create({"input": "a", "text": {"format": FORMAT}}, 256).params.grammar == grammar_from(schema)
    assert parse_create({"input": "a", "regex": "[ab]+"}, 256).params.grammar == GrammarSpec("regex", "[ab]+")
    for text in ({}, {"format": None}, {"format": {"type": "text"}}, {"verbosity": "low"}):
        assert parse_create({"input": "a", "text": text}, 256).params.grammar is None


def custom(syntax: str, definition: str) -> Any:
    return {
        "type": "custom",
        "name": "note",
        "format": {"type": "grammar", "syntax": syntax, "definition": definition},
    }


async def keep_to_grammars(client: openai.AsyncOpenAI, model: str) -> None:
    """Let the demo model call custom tools, whole and streamed."""
    quoted = r'\w{1,3}\n"[^"\\]{1,3}"\n'
    ask: Any = {"model": model, "input": "Hi", "max_output_tokens": 60, "parallel_tool_calls": False}
    ask["extra_body"] = {"seed": 1}  # some draws open brackets until the limit cuts them off
    ask |= {"tools": [custom("regex", f"^{quoted}$")], "tool_choice": "required"}
    (item,) = (await client.responses.create(**ask)).output
    assert item.type == "custom_tool_call"
    assert re.fullmatch(quoted, item.input), item.input
    nested = 'start: "(" (start | /[0-9]{1,2}/) ")"'
    ask |= {"tools": [custom("lark", nested)], "tool_choice": {"type": "custom", "name": "note"}}
    async with client.responses.stream(**ask) as stream:
        said = "".join([e.delta async for e in stream if e.type == "response.custom_tool_call_input.delta"])
    assert re.fullmatch(r"\(+(\d{1,2}\)+)?", said), said


@in_loop
async def test_the_demo_model_keeps_to_a_schema() -> None:
    async with (
        make_engine(EngineConfig()) as engine,
        live_server(engine) as live,
        official(live) as client,
        live.connect() as socket,
    ):
        ask: dict[str, Any] = {"input": "Who wrote the first program?", "text": {"format": FORMAT}}
        answer = await client.responses.create(model=engine.model_name, max_output_tokens=60, **ask)
        events = await respond(socket, max_output_tokens=60, **ask)
        for text in (answer.output_text, text_of(events)):
            person = json.loads(text)
            assert person["name"] in ("Ada", "Grace")
            assert 1 <= person["age"] <= 99
        assert answer.to_dict()["text"]["format"]["name"] == "person"
        await keep_to_grammars(client, engine.model_name)
        for fields, param in (
            ({"text": {"format": {**FORMAT, "schema": {"type": "nonsense"}}}}, "text.format"),
            ({"extra_body": {"regex": "[a"}}, "regex"),
            ({"tools": [custom("lark", "start: missing")]}, "tools"),
            ({"tools": [custom("lark", 'start: "a')]}, "tools"),
            ({"tools": [custom("regex", "(?=a)b")]}, "tools"),
            ({"tools": [custom("regex", "")]}, "tools[0].format"),
        ):
            for how in ({"stream": True}, {"background": True}, {}):
                with pytest.raises(openai.BadRequestError) as wrong:
                    await client.responses.create(model=engine.model_name, input="a", **fields, **how)
                assert wrong.value.param == param
