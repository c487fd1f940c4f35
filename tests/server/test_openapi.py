"""The OpenAPI document: it names every operation, takes what the endpoints take, and describes what they answer."""

import json
import time
from typing import Any

import pytest
from anthropic.types import Message
from doubles_http import MODEL, Live, count_up, in_loop, live_server, say
from jsonschema import Draft202012Validator, ValidationError
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from starlette.routing import Route

from aserve.config import Config
from aserve.engine.async_engine import AsyncEngine
from aserve.server.app import DOCUMENT, create_app
from aserve.server.chat_page import static_routes
from aserve.server.openapi import describe_api

API = describe_api(MODEL, has_key=False)
SCHEMAS = API["components"]["schemas"]


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": API["components"]})


def operations() -> dict[tuple[str, str], dict[str, Any]]:
    return {(method.upper(), path): one for path, methods in API["paths"].items() for method, one in methods.items()}


def test_every_route_has_an_operation_and_every_operation_a_route() -> None:
    pages = {DOCUMENT, *(page.path for page in static_routes() if isinstance(page, Route))}
    served = {
        (method, route.path.replace(":path}", "}"))
        for route in create_app(AsyncEngine(), Config()).routes
        if isinstance(route, Route) and route.path not in pages
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == operations().keys()


def test_all_schemas_are_sound() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    assert len({one["operationId"] for one in operations().values()}) == len(operations())


def references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(references, value))
    if not isinstance(value, dict):
        return set()
    named = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return named.union(*map(references, value.values()))


def test_every_reference_leads_somewhere() -> None:
    assert references(API) == {f"#/components/schemas/{name}" for name in SCHEMAS}


@pytest.mark.parametrize(
    ("official", "name"),
    [(ChatParams, "ChatBody"), (CompletionParams, "CompletionBody"), (ResponseCreateParamsBase, "CreateResponse")],
)
def test_every_field_of_the_official_clients_is_described(official: Any, name: str) -> None:
    assert set(official.__annotations__) - SCHEMAS[name]["properties"].keys() == set()


@pytest.mark.parametrize(
    ("name", "official"),
    [("ChatCompletion", ChatCompletion), ("Completion", Completion), ("Response", Response), ("Message", Message)],
)
def test_answers_have_what_the_official_types_require(name: str, official: Any) -> None:
    required = {field for field, one in official.model_fields.items() if one.is_required()}
    assert required <= set(SCHEMAS[name]["required"])
    assert set(SCHEMAS[name]["properties"]) <= {*official.model_fields, "store"}  # the last is in the reference alone


EXTRAS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"logprobs": True, "top_logprobs": 2, "n": 2}, {"stop": ["x"], "seed": 1}],
    "/v1/completions": [{"logprobs": 2, "echo": True, "n": 2}, {"prompt": [[1, 2], [3]], "max_tokens": 0}],
    "/tokenize": [{"return_token_strs": True}],
    "/v1/responses": [{"store": False, "metadata": {"a": "b"}}, {"background": True}, {"generate": False}],
}


@in_loop
async def test_answers_are_as_described() -> None:
    async with live_server(count_up) as live:
        assert (await live.http.get(DOCUMENT)).json() == API
        for (method, path), operation in operations().items():
            example = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            for extra in ({}, *EXTRAS.get(path, ())):
                await check_answer(live, method, path, operation, example and {**example, **extra})


async def check_answer(live: Live, method: str, path: str, operation: Any, body: dict[str, Any] | None) -> None:
    if "{response_id}" in path:
        made = await live.post("/v1/responses", input="hi", background=True, max_output_tokens=3)
        path = path.replace("{response_id}", made.json()["id"])
    url = path.replace("{model}", MODEL)
    answer = await live.http.request(method, url, content=None if body is None else json.dumps(body))
    expected = operation["responses"]["default" if url.endswith("/compact") else "200"]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert answer.status_code == (400 if url.endswith("/compact") else 200), (url, answer.text)
    if kind == "application/json":
        validator(expected[kind]["schema"]).validate(answer.json())
    else:
        assert expected[kind]["schema"] == {"type": "string"}


def check_events(path: str, text: str) -> None:
    """Hold each event of a stream to the description, and what its data says to the description of that."""
    described = API["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    for block in blocks:
        event = dict(line.split(": ", 1) for line in block.split("\n"))
        validator(described).validate(event)
        data = described["properties"]["data"]
        if "anyOf" in data and event["data"] == "[DONE]":
            assert data["anyOf"][0] == {"const": "[DONE]"}
            continue
        content = data["anyOf"][1]["contentSchema"] if "anyOf" in data else data["contentSchema"]
        validator(content).validate(json.loads(event["data"]))


@in_loop
async def test_streams_are_as_described() -> None:
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with live_server(count_up) as live:
        for (_, path), operation in operations().items():
            example = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            if example and "text/event-stream" in operation["responses"]["200"]["content"]:
                for extra in ({}, usage, *EXTRAS.get(path, ())):
                    answer = await live.post(path, **{**example, **extra, "stream": True})
                    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
                    check_events(path, answer.text)


@in_loop
async def test_calls_and_reasoning_are_as_described() -> None:
    said = '<think>\nHm.\n</think>\n\nSee.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = {
        "/v1/chat/completions": {"tools": [{"type": "function", "function": function}]},
        "/v1/responses": {"tools": [{"type": "function", **function}]},
        "/v1/messages": {
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "thinking": {"type": "adaptive"},
        },
    }
    async with live_server(say(said), reasoning_parser="think") as live:
        for path, fields in tools.items():
            operation = operations()["POST", path]
            example = operation["requestBody"]["content"]["application/json"]["example"]
            fields |= {"max_output_tokens": 200} if path == "/v1/responses" else {"max_tokens": 200}
            plain = await live.post(path, **{**example, **fields})
            assert ("tool_calls" in plain.text) + ("function_call" in plain.text) + ("tool_use" in plain.text) > 0
            await check_answer(live, "POST", path, operation, {**example, **fields})
            check_events(path, (await live.post(path, **{**example, **fields, "stream": True})).text)


@in_loop
async def test_errors_are_as_described() -> None:
    async with live_server() as live:
        for (method, path), operation in operations().items():
            schema = operation["responses"]["default"]["content"]["application/json"]["schema"]
            for answer in (
                await live.http.request("PATCH", path.replace("{", "").replace("}", "")),
                await live.http.request(method, path.replace("{", "").replace("}", ""), content=b"["),
            ):
                if answer.status_code != 200:
                    validator(schema).validate(answer.json())


def test_what_the_document_calls_wrong_is_wrong_and_null_is_absent() -> None:
    chat = validator(SCHEMAS["ChatBody"])
    good = {"messages": [{"role": "user", "content": "hi"}], "temperature": None, "model": MODEL, "user": None}
    chat.validate({**good, "frobnicate": 1})
    wrong = [
        {"temperature": -1}, {"temperature": "hot"}, {"n": 0}, {"n": 129}, {"messages": []}, {"messages": ["hi"]},
        {"messages": [{"role": "wizard"}]}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"model": "gpt-4"}, {"audio": {}}, {"stop": 5}, {"logit_bias": {"5": None}}, {"messages": None},
    ]  # fmt: skip
    for fields in wrong:
        with pytest.raises(ValidationError):
            chat.validate({**good, **fields})


@pytest.mark.parametrize(("key", "expected"), [(None, None), ("secret", [{"key": []}])])
@in_loop
async def test_the_key_is_described_where_it_is_needed(key: str | None, expected: Any) -> None:
    headers = {"authorization": f"Bearer {key}"}
    async with live_server(api_key=key, headers=headers) as live:
        assert (await live.http.get(DOCUMENT)).json().get("security") == expected


@in_loop
async def test_reading_the_document_again_costs_nothing_to_speak_of() -> None:
    async with live_server() as live:
        shown = (await live.http.get(DOCUMENT)).json()
        started = time.process_time()
        described = describe_api(MODEL, has_key=False)
        once = time.process_time() - started
        assert shown == json.loads(json.dumps(described))
        times = []
        for _ in range(3):  # the garbage collector may come once
            started = time.process_time()
            for _ in range(20):
                await live.http.get(DOCUMENT)
            times.append(time.process_time() - started)
        assert min(times) < 10 * once
