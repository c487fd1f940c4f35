"""The fields by which clients ask for structured output, as one grammar for the engine; no I/O.

``response_format`` (chat and completions) and ``text.format`` (responses) are OpenAI's, ``output_config.format``
(messages), once ``output_format``, is Anthropic's, ``guided_*`` and ``structured_outputs`` are vLLM's, ``regex``,
``ebnf`` and ``json_schema`` SGLang's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from aserve.engine.async_engine import AsyncEngine
from aserve.errors import ClientError, quoted
from aserve.request import GrammarKind, GrammarSpec, SamplingParams

EXTRAS: dict[str, GrammarKind] = {  # field -> what it holds
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "lark",
}
STRUCTURED_OUTPUTS: dict[str, GrammarKind] = {  # the same within ``structured_outputs``
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_object": "json_object",
}
GRAMMAR_FIELDS = frozenset({"response_format", "structured_outputs", *EXTRAS})
FORMATS = ("text", "json_object", "json_schema")
NAMELESS_FORMATS = ("output_config.format", "output_format")  # whose schemas have no name
MAX_NAME_CHARS = 64
FORMAT_SCHEMA: dict[str, Any] = {  # of ``response_format``, as JSON schema
    "anyOf": [
        {"type": "null"},
        {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
                        "strict": {"type": ["boolean", "null"]},
                        "schema": {"type": "object"},
                    },
                },
            },
        },
    ]
}


def grammar_from(fields: Mapping[str, Any], format_field: str = "response_format") -> GrammarSpec | None:
    """Return what the output must match, None for any text.

    ``format_field`` is the name of the protocol's own field. Raises ClientError that names the field at fault, and for
    two that ask for a grammar each.
    """
    asked = _asked_grammars(fields, format_field)
    if len(asked) > 1:
        raise ClientError(f"{' and '.join(sorted(asked)[:2])} cannot be combined", param=sorted(asked)[0])
    return next(iter(asked.values()), None)


async def prepare_grammar(
    engine: AsyncEngine, params: SamplingParams, fields: Mapping[str, Any], format_field: str = "response_format"
) -> None:
    """Have the grammar that ``fields`` asked for compiled; raise ClientError that names the field if it is no good."""
    if params.grammar is None:
        return
    try:
        await engine.prepare(params)
    except ClientError as error:
        if error.param != "grammar":
            raise
        name = next(iter(_asked_grammars(fields, format_field)), "tools")
        raise ClientError(error.message, param=name, code=error.code) from None  # others may get the same error


def _asked_grammars(fields: Mapping[str, Any], format_field: str) -> dict[str, GrammarSpec]:
    """Return the grammars by the names of their fields."""
    asked: dict[str, GrammarSpec | None] = {format_field: _read_format(_get(fields, format_field), format_field)}
    for name, kind in EXTRAS.items():
        asked[name] = _read(kind, fields.get(name), name)
    options = fields.get("structured_outputs")
    if options is not None:
        asked |= _read_structured_outputs(options)
    return {name: spec for name, spec in asked.items() if spec is not None}


def _get(fields: Mapping[str, Any], path: str) -> Any:
    value: Any = fields
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _read_format(value: Any, name: str) -> GrammarSpec | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ClientError(f"{name} must be an object", param=name)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json_object")
    if kind != "json_schema":
        raise ClientError(
            f"{name}.type must be one of {', '.join(FORMATS)}, got {quoted(kind)}",
            param=f"{name}.type",
            code="unsupported_parameter",
        )
    if name in NAMELESS_FORMATS:
        return _read_schema(value.get("schema"), f"{name}.schema")
    if name != "response_format":  # responses have the fields of json_schema beside the type
        return _read_named_schema(value, name)
    return _read_named_schema(value.get("json_schema"), f"{name}.json_schema")


def _read_named_schema(value: Any, name: str) -> GrammarSpec:
    """Read name, strict and schema; outputs are held to the schema whether strict or not."""
    if not isinstance(value, Mapping):
        raise ClientError(f"{name} must be an object", param=name)
    title, strict, schema = value.get("name"), value.get("strict"), value.get("schema")
    if not isinstance(title, str) or not 1 <= len(title) <= MAX_NAME_CHARS:
        raise ClientError(f"{name}.name must be a string of 1 to {MAX_NAME_CHARS} characters", param=f"{name}.name")
    if strict is not None and not isinstance(strict, bool):
        raise ClientError(f"{name}.strict must be true or false", param=f"{name}.strict")
    if "schema" not in value:
        return GrammarSpec("json_object")
    if not isinstance(schema, Mapping):
        raise ClientError(f"{name}.schema must be an object", param=f"{name}.schema")
    return _spec("json_schema", _dump(schema, f"{name}.schema"), f"{name}.schema")


def _read_structured_outputs(options: Any) -> dict[str, GrammarSpec | None]:
    if not isinstance(options, Mapping):
        raise ClientError("structured_outputs must be an object", param="structured_outputs")
    names = {name for name, value in options.items() if value is not None and value is not False}
    if unknown := sorted(names - STRUCTURED_OUTPUTS.keys()):
        field = f"structured_outputs.{unknown[0][:64]}"
        raise ClientError(f"{field} is not supported", param=field, code="unsupported_parameter")
    return {
        f"structured_outputs.{name}": _read(kind, options.get(name), f"structured_outputs.{name}")
        for name, kind in STRUCTURED_OUTPUTS.items()
        if name in names
    }


def _read(kind: GrammarKind, value: Any, name: str) -> GrammarSpec | None:
    return None if value is None else READERS[kind](value, name)


def _read_object(value: Any, name: str) -> GrammarSpec:
    if value is not True:
        raise ClientError(f"{name} must be true or false", param=name)
    return GrammarSpec("json_object")


def _read_schema(value: Any, name: str) -> GrammarSpec:
    """Take a schema as an object or as its JSON."""
    if isinstance(value, str):
        return _spec("json_schema", value, name)
    if not isinstance(value, Mapping):
        raise ClientError(f"{name} must be a JSON schema, as an object or a string", param=name)
    return _spec("json_schema", _dump(value, name), name)


def _read_choice(value: Any, name: str) -> GrammarSpec:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise ClientError(f"{name} must be a list of strings that are not empty", param=name)
    return _spec("choice", _dump(value, name), name)


def _text_reader(kind: GrammarKind) -> Callable[[Any, str], GrammarSpec]:
    def read(value: Any, name: str) -> GrammarSpec:
        if not isinstance(value, str) or not value:
            raise ClientError(f"{name} must be a string that is not empty", param=name)
        return _spec(kind, value, name)

    return read


READERS: dict[GrammarKind, Callable[[Any, str], GrammarSpec]] = {
    "json_object": _read_object,
    "json_schema": _read_schema,
    "choice": _read_choice,
    "regex": _text_reader("regex"),
    "lark": _text_reader("lark"),
}


def _spec(kind: GrammarKind, text: str, name: str) -> GrammarSpec:
    """Build the spec; what is wrong with its size is said of ``name``."""
    try:
        return GrammarSpec(kind, text)
    except ClientError as error:
        raise ClientError(error.message.replace("the grammar", name, 1), param=name) from None


def _dump(value: Any, name: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        raise ClientError(f"{name} is nested too deeply or holds a lone surrogate", param=name) from None
