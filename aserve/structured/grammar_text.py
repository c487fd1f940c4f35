"""From a GrammarSpec to the text that llguidance compiles, after cheap checks of form and depth."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import orjson
from llguidance import LLMatcher

from aserve.errors import ClientError
from aserve.request import GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists for type checkers only

MAX_SCHEMA_DEPTH = 100  # of objects and arrays within each other
MAX_CHOICES = 4096
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


def to_llguidance(spec: GrammarSpec) -> str:
    """Return ``spec`` as a grammar of llguidance; raise ClientError for what is wrong with its form."""
    match spec.kind:
        case "json_object":
            return from_schema(ANY_OBJECT)
        case "json_schema":
            return from_schema(spec.text)
        case "regex":
            return str(LLMatcher.grammar_from_regex(spec.text))
        case "lark":
            return str(LLMatcher.grammar_from_lark(spec.text))
        case "choice":
            return str(LLMatcher.grammar_from_lark(choice_to_lark(spec.text)))


def from_schema(text: str) -> str:
    """Return the grammar of a JSON schema, which must be an object."""
    schema = _load(text, "the JSON schema")
    if not isinstance(schema, dict):
        raise ClientError("the JSON schema must be an object", param="grammar")
    for node, depth in walk(schema):
        if depth > MAX_SCHEMA_DEPTH:
            raise ClientError(f"the JSON schema is nested more than {MAX_SCHEMA_DEPTH} levels deep", param="grammar")
        check_node(node)
    try:
        return str(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))
    except ValueError as error:
        raise ClientError(f"the JSON schema cannot be used: {error}", param="grammar") from None


def choice_to_lark(text: str) -> str:
    """Return the grammar of a JSON list of strings."""
    choices = _load(text, "the list of choices")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ClientError("choices must be a list of strings", param="grammar")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ClientError(f"there must be 1 to {MAX_CHOICES} choices", param="grammar")
    if not all(choices):
        raise ClientError("a choice must not be empty", param="grammar")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


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


def _load(text: str, what: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"{what} is not valid JSON: {error}", param="grammar") from None
