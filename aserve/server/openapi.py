"""The OpenAPI document of the HTTP API, built from what the endpoints parse."""

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import orjson
from msgspec import Struct
from starlette.types import Receive, Scope

from aserve import __version__
from aserve.request import INTEGER_RANGES, NUMBER_RANGES
from aserve.server.openapi_operations import CREATE_RESPONSE, OPERATIONS, Operation
from aserve.server.responses import schema as response_schema
from aserve.server.schema import ACCEPTED_WITHOUT_EFFECT, HARMLESS, REFUSED, CommonBody
from aserve.server.state import ServerState
from aserve.server.structured_request import FORMAT_SCHEMA

Schema = dict[str, Any]

MODEL_NAME = "ModelName"  # the schema of names that the server knows
REFERENCE = "#/components/schemas/"
CLAMPED = "top_k"  # any larger value means all tokens
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
JSON_TYPES = {bool: "boolean", dict: "object", int: "integer", list: "array", str: "string"}
DONE: Schema = {"const": "[DONE]"}


async def show_api(state: ServerState, scope: Scope, receive: Receive) -> orjson.Fragment:
    """Return the document of this server."""
    has_key = state.config.api_key is not None
    return orjson.Fragment(await asyncio.to_thread(_document, state.engine.model_name, has_key=has_key))


@cache
def _document(model: str, *, has_key: bool) -> bytes:
    """Return it as JSON; to describe everything takes tens of milliseconds, too long for the event loop."""
    return orjson.dumps(describe_api(model, has_key=has_key))


def describe_api(model: str, *, has_key: bool) -> dict[str, Any]:
    """Return the document of a server of ``model``; ``has_key`` says whether it asks for an API key."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _describe(method, path, operation)
    components: dict[str, Any] = {"schemas": {**_schemas(), MODEL_NAME: {"enum": [model]}}}
    document: dict[str, Any] = {
        "openapi": "3.2.0",
        "info": {"title": "aserve", "version": __version__, "description": "An LLM serving engine."},
        "paths": paths,
        "components": components,
    }
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _describe(method: str, path: str, operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(method, path),
        "summary": operation.summary,
        "responses": _responses(operation),
    }
    if operation.is_open:
        described["security"] = []
    if parameters := [*_path_parameters(path), *_query_parameters(operation)]:
        described["parameters"] = parameters
    if operation.body is not None:
        name = operation.body if isinstance(operation.body, str) else operation.body.__name__
        content = {"schema": _reference(name), "example": operation.example}
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        content: dict[str, Any] = {TEXT: {"schema": {"type": "string"}}}
    else:
        content = {JSON: {"schema": _reference(operation.answer.__name__)}}
    if operation.event is not None:
        content[EVENTS] = {"itemSchema": _event(operation, operation.event)}
    error = {"description": "an error", "content": {JSON: {"schema": _reference(operation.error.__name__)}}}
    answer: dict[str, Any] = {"description": "the answer", "content": content}
    if operation.opens is not None:
        answer["links"] = dict(_links(operation.opens))
    responses = {"200": answer, "default": error}
    if operation.failure is not None:
        failure = {JSON: {"schema": _reference(operation.failure.__name__)}}
        responses["503"] = {"description": "a failure", "content": failure}
    return responses


def _event(operation: Operation, kind: type[Struct]) -> Schema:
    """Return the schema of one server-sent event; an error may come in the place of any."""
    forms = {kind.__name__: kind, operation.error.__name__: operation.error}
    shown = {"contentMediaType": JSON, "contentSchema": {"anyOf": [_reference(name) for name in forms]}}
    data = {"anyOf": [DONE, shown]} if operation.ends_with_done else shown
    properties = {"event": {"type": "string"}, "data": {"type": "string", **data}}
    return {"type": "object", "required": ["data"], "properties": properties}


def _links(opened: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for method, path in OPERATIONS:
        if path.startswith(opened):
            name = opened.rpartition("{")[2].rstrip("}")
            operation_id = _operation_id(method, path)
            yield operation_id, {"operationId": operation_id, "parameters": {name: "$response.body#/id"}}


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


def _path_parameters(path: str) -> Iterator[dict[str, Any]]:
    for part in path.split("/"):
        if part.startswith("{"):
            name = part.strip("{}")
            schema = _reference(MODEL_NAME) if name == "model" else {"type": "string", "minLength": 1}
            yield {"name": name, "in": "path", "required": True, "schema": schema}


def _query_parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    for name, schema in operation.query:
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _reference(name: str) -> Schema:
    return {"$ref": REFERENCE + name}


def _schemas() -> dict[str, Schema]:
    bodies = {operation.body for operation in OPERATIONS.values() if isinstance(operation.body, type)}
    schemas = _components(bodies)
    for schema in schemas.values():
        _allow_null(schema)
    for body in bodies:
        if issubclass(body, CommonBody):
            _add_lists(schemas[body.__name__])
    schemas[CREATE_RESPONSE] = _response_schema(schemas["ChatBody"])
    return schemas | _components(_answers())


def _answers() -> set[type[Struct]]:
    kinds = {kind for operation in OPERATIONS.values() for kind in (operation.answer, operation.event, operation.error)}
    return {kind for kind in kinds if kind is not None}


def _components(kinds: Iterable[type[Struct]]) -> dict[str, Schema]:
    named = sorted(kinds, key=lambda kind: kind.__name__)
    schemas: dict[str, Schema] = msgspec.json.schema_components(named, ref_template=REFERENCE + "{name}")[1]
    return schemas


def _allow_null(schema: Schema) -> None:
    """Say that null stands for an absent field, and what SamplingParams checks."""
    required = schema["required"]
    for name, field in schema["properties"].items():
        if name not in required:
            described = _reference(MODEL_NAME) if name == "model" else _with_range(name, field)
            schema["properties"][name] = {"anyOf": [described, {"type": "null"}]}


def _with_range(name: str, field: Schema) -> Schema:
    low, high = NUMBER_RANGES.get(name) or INTEGER_RANGES.get(name) or (None, None)
    if low is None or field.get("type") not in ("number", "integer"):
        return field
    return {**field, "minimum": low} if name == CLAMPED else {**field, "minimum": low, "maximum": high}


def _add_lists(schema: Schema) -> None:
    """Add the fields that stand in the lists of ``schema.py``."""
    properties = schema["properties"]
    for names, field in (
        (REFUSED, {"type": "null", "description": "not supported"}),
        (ACCEPTED_WITHOUT_EFFECT, {"description": "accepted, without effect"}),
    ):
        for name in sorted(names):
            properties.setdefault(name, field)
    for name, values in HARMLESS.items():
        properties.setdefault(name, _only(values))
    properties["response_format"] = FORMAT_SCHEMA


def _only(values: Sequence[Any]) -> Schema:
    return {"enum": [*values, None], "description": "not supported; these values ask for nothing"}


def _response_schema(chat: Mapping[str, Any]) -> Schema:
    """Return the body of a response: fields of a chat with the same meaning, and those in its own lists."""
    fields: dict[str, Schema] = {name: {} for name in sorted(response_schema.KNOWN)}
    for name, kind in response_schema.FIELD_TYPES.items():
        fields[name] = {"type": [JSON_TYPES[kind], "null"]}
    for name in ("model", *response_schema.SAMPLING_FIELDS):
        fields[name] = chat["properties"][name]
    for name in response_schema.REFUSED:
        fields[name] = {"type": "null", "description": "not supported"}
    for name, values in response_schema.HARMLESS.items():
        fields[name] = _only(values)
    for name, use in response_schema.RENAMED.items():
        fields[name] = {"enum": [None, False], "description": f"use {use}"}
    fields["include"]["items"] = {"enum": sorted(response_schema.INCLUDABLE)}
    fields["input"] = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": "object"}}]}
    return {"type": "object", "description": "What to answer, and how.", "properties": fields}
