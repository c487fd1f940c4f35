"""How model families write calls, as grammars; the parsers in ``parsing/`` read the same."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from aserve.errors import ClientError, quoted
from aserve.structured.json_schema import ANY_OBJECT, check_schema, schema_expression, walk
from aserve.structured.lark_text import LarkText
from aserve.structured.text_form import TextForm

BAR, LOW = "\uff5c", "\u2581"  # in DeepSeek's markers
IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
END_OF_TAG = "\n</parameter>\n"
ANY_SCHEMA: Mapping[str, Any] = orjson.loads(ANY_OBJECT)

Schema = Mapping[str, Any] | None
"""Of the arguments of a function; None: any object."""
Parameters = TextForm | Schema
"""What a function takes. A form that a syntax cannot hold calls to counts as its schema."""
Arguments = Callable[[LarkText, Parameters], str]
"""Returns an expression for the arguments of a function; raises ClientError if there is none."""
Body = Callable[[LarkText, str, Parameters], str]
"""Returns an expression for a call of the function of this name, without what all calls have around it."""


def json_arguments(lark: LarkText, parameters: Parameters) -> str:
    """Return an expression for the arguments as a JSON object."""
    if isinstance(parameters, TextForm) and (text := parameters.quoted(lark)) is not None:
        return f"{lark.literal(f'{{{_quoted_name(parameters)}: ')} {text} {lark.literal('}')}"
    return lark.rule(_checked(_schema_of(parameters) or ANY_SCHEMA))


def keyword_arguments(lark: LarkText, parameters: Parameters) -> str:
    """Return an expression for the arguments as Python writes them, with values that JSON knows."""
    if isinstance(parameters, TextForm) and (text := parameters.quoted(lark)) is not None:
        return f"{lark.literal(f'{parameters.argument}=')} {text}"
    schema = _schema_of(parameters)
    if not schema or "properties" not in schema:
        pair = lark.rule(f'/{IDENTIFIER}/ "=" {lark.rule(schema_expression({}))}')
        return lark.rule(f'({pair} (", " {pair})*)?')
    pairs = []
    for name, value, is_required in _properties(schema):
        if not re.fullmatch(IDENTIFIER, name):
            raise ClientError(f"the parameter {name[:64]!r} is no name in Python, as this model's calls need it")
        pairs.append((f"{lark.literal(f'{name}=')} {lark.rule(_checked(value))}", is_required))
    return _comma_list(lark, pairs)


def tagged_arguments(lark: LarkText, parameters: Parameters) -> str:
    """Return an expression for the arguments as Qwen3-Coder writes them, a tag for each; strings stand as they are."""
    if isinstance(parameters, TextForm) and (text := parameters.unquoted(lark, END_OF_TAG)) is not None:
        return f"{lark.literal(f'<parameter={parameters.argument}>{chr(10)}')} {text}"
    schema = _schema_of(parameters)
    if not schema or "properties" not in schema:
        name = r'"<parameter=" /[^>\n]{1,256}/ ">\n"'
        return lark.rule(f"({name} {_raw_text(lark)})*")
    tags = []
    for name, value, is_required in _properties(schema):
        if ">" in name or "\n" in name:
            raise ClientError(f"the parameter {name[:64]!r} cannot stand in a tag, as this model's calls need it")
        opening = lark.literal(f"<parameter={name}>\n")
        tags.append(f"({opening} {_tag_value(lark, value)}){'' if is_required else '?'}")
    return lark.rule(" ".join(tags)) if tags else '""'


def named(between: str, arguments: Arguments = json_arguments, name_pattern: str = ".+") -> Body:
    """Return how a call is written as its name, ``between`` and its arguments."""

    def body(lark: LarkText, name: str, parameters: Parameters) -> str:
        if not re.fullmatch(name_pattern, name, re.ASCII):
            raise ClientError("its name cannot be written in this model's calls")
        return f"{lark.literal(name + between)} {arguments(lark, parameters)}"

    return body


def json_call(key: str) -> Body:
    """Return how a call is written as one object, with the arguments under ``key``.

    An answer in JSON may begin with the same letters, so this is a schema: literal text would win over it.
    """

    def body(lark: LarkText, name: str, parameters: Parameters) -> str:
        if isinstance(parameters, TextForm) and (text := parameters.quoted(lark)) is not None:
            opening = f'{{"name": "{name}", "{key}": {{{_quoted_name(parameters)}: '
            return f"{lark.literal(opening)} {text} {lark.literal('}}')}"
        arguments = dict(_schema_of(parameters) or ANY_SCHEMA)
        check_schema(arguments)
        _check_references(arguments)
        properties = {"name": {"const": name}, key: arguments}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        return lark.rule(schema_expression({**_definitions(arguments), **call}))

    return body


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """One way of writing calls: ``opening``, calls with ``separator`` between them, ``closing``.

    A call is ``before``, ``body`` and ``after``. Calls begin with ``trigger``, by which they are known within text, or
    only as an answer's beginning (``begins_answer``).
    """

    body: Body
    trigger: str
    before: str = ""
    after: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    begins_answer: bool = False
    is_single: bool = False

    def calls(self, lark: LarkText, functions: Mapping[str, Parameters], *, is_single: bool, skip: str = "") -> str:
        """Return an expression for one call or more, whose beginning ``skip`` stands there already."""
        call = self._call(lark, functions)
        first = call if self.opening else self._call(lark, functions, skip)
        parts = [lark.literal(self.opening[len(skip) :]), first]
        if not (is_single or self.is_single):
            parts.append(f"({lark.literal(self.separator)} {call})*")
        return lark.rule(" ".join([*parts, lark.literal(self.closing)]))

    def _call(self, lark: LarkText, functions: Mapping[str, Parameters], skip: str = "") -> str:
        bodies = " | ".join(self._body(lark, name, parameters) for name, parameters in functions.items())
        return lark.rule(f"{lark.literal(self.before[len(skip) :])} ({bodies}) {lark.literal(self.after)}")

    def _body(self, lark: LarkText, name: str, parameters: Parameters) -> str:
        key = ("body", name)
        if key not in lark.shared:
            try:
                lark.shared[key] = lark.rule(self.body(lark, name, parameters))
            except ClientError as error:
                raise ClientError(f"the function {name}: {error.message}", param="grammar") from None
        return lark.shared[key]


CALL_SYNTAXES: Mapping[str, CallSyntax] = {
    "hermes": CallSyntax(
        trigger="<tool_call>",
        before='<tool_call>\n{"name": "',
        body=named('", "arguments": '),
        after="}\n</tool_call>",
        separator="\n",
    ),
    "qwen3_coder": CallSyntax(
        trigger="<tool_call>",
        before="<tool_call>\n<function=",
        body=named(">\n", tagged_arguments),
        after="</function>\n</tool_call>",
        separator="\n",
    ),
    "llama3_json": CallSyntax(trigger="{", body=json_call("parameters"), separator="; ", begins_answer=True),
    "mistral": CallSyntax(
        trigger="[TOOL_CALLS]",
        opening="[TOOL_CALLS][",
        before='{"name": "',
        body=named('", "arguments": '),
        after="}",
        separator=", ",
        closing="]",
    ),
    "mistral_args": CallSyntax(trigger="[TOOL_CALLS]", before="[TOOL_CALLS]", body=named("[ARGS]")),
    "pythonic": CallSyntax(
        trigger="[",
        opening="[",
        body=named("(", keyword_arguments, rf"{IDENTIFIER}(\.{IDENTIFIER})*"),
        after=")",
        separator=", ",
        closing="]",
        begins_answer=True,
    ),
    "deepseek": CallSyntax(
        trigger=f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>",
        opening=f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>",
        before=f"<{BAR}tool{LOW}call{LOW}begin{BAR}>",
        body=named(f"<{BAR}tool{LOW}sep{BAR}>"),
        after=f"<{BAR}tool{LOW}call{LOW}end{BAR}>",
        closing=f"<{BAR}tool{LOW}calls{LOW}end{BAR}>",
    ),
    "deepseek_fenced": CallSyntax(
        trigger=f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>",
        opening=f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>",
        before=f"<{BAR}tool{LOW}call{LOW}begin{BAR}>function<{BAR}tool{LOW}sep{BAR}>",
        body=named("\n```json\n"),
        after=f"\n```<{BAR}tool{LOW}call{LOW}end{BAR}>",
        separator="\n",
        closing=f"<{BAR}tool{LOW}calls{LOW}end{BAR}>",
    ),
    "harmony": CallSyntax(  # a call ends with an end token
        trigger="<|channel|>commentary to=functions.",
        before="<|channel|>commentary to=functions.",
        body=named(" <|constrain|>json<|message|>"),
        is_single=True,
    ),
}


def _schema_of(parameters: Parameters) -> Schema:
    return parameters.schema() if isinstance(parameters, TextForm) else parameters


def _quoted_name(form: TextForm) -> str:
    return orjson.dumps(form.argument).decode()


def _checked(schema: Mapping[str, Any]) -> str:
    check_schema(schema)
    return schema_expression(schema)


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Return name, schema and whether it is required of each property."""
    properties, required = schema["properties"], schema.get("required")
    if not isinstance(properties, Mapping):
        raise ClientError("properties must be an object")
    _check_references(schema)
    shared = _definitions(schema)
    named = required if isinstance(required, list) else []
    if missing := [name for name in named if not isinstance(name, str) or name not in properties]:
        raise ClientError(f"required names {quoted(missing[0])}, which is no property")
    found = []
    for name, value in properties.items():
        if value is not True and not isinstance(value, dict):
            raise ClientError(f"the schema of {name[:64]!r} must be an object")
        found.append((name, {**shared, **({} if value is True else value)}, name in named))
    return found


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _check_references(schema: Mapping[str, Any]) -> None:
    """Refuse references to places that a part of ``schema`` does not have when it stands alone."""
    for node, _ in walk(schema):
        target = node.get("$ref") if isinstance(node, dict) else None
        if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
            raise ClientError(f"$ref to {target[:64]!r} is not supported in this model's calls; use $defs")


def _comma_list(lark: LarkText, pairs: list[tuple[str, bool]]) -> str:
    """Return an expression for ``pairs`` of an item and whether it is required, in this order."""
    behind = at_start = '""'  # what may follow behind an item, and where none stands yet
    for item, is_required in reversed(pairs):
        follow, begin = lark.rule(f'", " {item} {behind}'), lark.rule(f"{item} {behind}")
        if is_required:
            behind, at_start = follow, begin
        else:
            behind, at_start = lark.rule(f"{follow} | {behind}"), lark.rule(f"{begin} | {at_start}")
    return at_start


def _tag_value(lark: LarkText, schema: Mapping[str, Any]) -> str:
    closing = lark.literal(END_OF_TAG)
    choices = schema.get("enum")
    if schema.get("type") != "string":
        return f"{lark.rule(_checked(schema))} {closing}"
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(map(lark.literal, choices))}) {closing}"
    return _raw_text(lark)


def _raw_text(lark: LarkText) -> str:
    return lark.until(END_OF_TAG)
