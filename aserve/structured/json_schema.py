"""JSON schemas that clients send: cheap checks of form and depth, and the options that outputs are written with."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from llguidance import LLMatcher

from aserve.errors import ClientError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists for type checkers only

MAX_SCHEMA_DEPTH = 100  # of objects and arrays within each other
WHITE_SPACE = " ?"  # at each place where JSON allows any; a model cannot stay there for ever
JSON_OPTIONS: "JsonCompileOptions" = {  # all of them, since a schema may bring its own under "x-guidance"
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": WHITE_SPACE,
    "whitespace_flexible": True,
    "coerce_one_of": False,
    "lenient": False,
    "json_allow_general_unicode_escapes": False,
}
ANY_OBJECT = '{"type":"object"}'


def from_schema(text: str) -> str:
    """Return the grammar of llguidance for the JSON of a schema, which must be an object."""
    schema = load_json(text, "the JSON schema")
    check_schema(schema)
    try:
        return str(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))
    except ValueError as error:
        raise ClientError(f"the JSON schema cannot be used: {error}", param="grammar") from None


def schema_expression(schema: Mapping[str, Any]) -> str:
    """Return ``schema``, once it was checked, as an expression within a grammar in Lark's notation."""
    return f"%json {orjson.dumps({**schema, 'x-guidance': JSON_OPTIONS}).decode()}"


def check_schema(schema: Any) -> None:
    """Raise ClientError for what is no object, is too deep, or would be taken but not enforced."""
    if not isinstance(schema, dict):
        raise ClientError("the JSON schema must be an object", param="grammar")
    for node, depth in walk(schema):
        if depth > MAX_SCHEMA_DEPTH:
            raise ClientError(f"the JSON schema is nested more than {MAX_SCHEMA_DEPTH} levels deep", param="grammar")
        check_node(node)


def walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield every object and array within ``value``, with its depth."""
    stack = [(value, 1)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        inner = node.values() if isinstance(node, dict) else node
        stack.extend((item, depth + 1) for item in inner if isinstance(item, dict | list))


def check_node(node: Any) -> None:
    """Refuse what llguidance would take, but not hold outputs to."""
    if not isinstance(node, dict):
        return
    fewest = node.get("minProperties")
    named = node.get("required")
    if isinstance(fewest, int) and fewest > 1 + len(named if isinstance(named, list) else ()):
        raise ClientError(
            "minProperties cannot be enforced beyond one more than the required properties", param="grammar"
        )


def load_json(text: str, what: str) -> Any:
    """Return the value of ``text``; raise ClientError that calls it ``what``."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"{what} is not valid JSON: {error}", param="grammar") from None
