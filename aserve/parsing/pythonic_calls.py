"""Calls as a Python list: ``[get_weather(city="Prague"), now()]``."""

import ast
import re
import warnings
from collections.abc import Collection
from typing import Any

import orjson

from aserve.parsing.call_reader import CallSequence, ReaderState
from aserve.parsing.deltas import ParsedDelta
from aserve.parsing.spans import ValueSpan

MAX_CHARS = 1 << 16  # of a list
OPENING = re.compile(r"\s*(?:\[\s*(?P<name>[\w.]*)(?P<behind>\s*[^\w.\s])?)?", re.DOTALL)
CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicCalls:
    """Reads one list. Its calls are known when it ends; a list of anything but calls of ``names`` is text."""

    def __init__(self, calls: CallSequence, names: Collection[str]) -> None:
        self.state = ReaderState.OPEN
        self.rest = ""
        self._calls = calls
        self._names = names
        self._raw = ""
        self._span = ValueSpan("\"'")
        self._is_begun = False  # past white space

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        self._raw += text
        if not self._is_begun:
            text = self._raw.lstrip()
            self._is_begun = bool(text)
        if not self._is_begun:
            return []
        if not self._may_be_calls():
            return self._fail()
        end = self._span.scan(text)
        num_chars = len(self._raw) - (0 if end is None else len(text) - end)
        if num_chars > MAX_CHARS:
            return self._fail()
        if end is None:
            return []
        found = parse_calls(self._raw[:num_chars].strip(), self._names)
        if found is None:
            return self._fail()
        self.state, self.rest = ReaderState.DONE, self._raw[num_chars:]
        deltas: list[ParsedDelta] = []
        for name, arguments in found:
            deltas += [self._calls.start(name), self._calls.arguments(arguments)]
        return deltas

    def flush(self) -> list[ParsedDelta]:
        """Learn that no more text comes."""
        return self._fail() if self.state is ReaderState.OPEN else []

    def _fail(self) -> list[ParsedDelta]:
        self.state, self.rest = ReaderState.FAILED, self._raw
        return []

    def _may_be_calls(self) -> bool:
        """Whether the beginning is that of a list whose first element calls a known function."""
        opening = OPENING.match(self._raw)
        assert opening is not None  # it matches the empty text
        name, behind = opening["name"], opening["behind"]
        if name is None:
            return not self._raw.strip()
        if behind is None:
            return any(known.startswith(name) for known in self._names)
        return name in self._names and behind.strip() == "("


def parse_calls(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """Return names and arguments, as JSON, of the calls in a list, None if it is not one of calls."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        found = [(ast.unparse(call.func), _arguments(call)) for call in tree.elts if isinstance(call, ast.Call)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    is_known = len(found) == len(tree.elts) and all(name in names for name, _ in found)
    return found if is_known else None


def _arguments(call: ast.Call) -> str:
    """Return the keyword arguments as JSON; raise ValueError or TypeError for what JSON cannot say."""
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("a call by position")
    return orjson.dumps({keyword.arg: _value(keyword.value) for keyword in call.keywords}).decode()


def _value(node: ast.expr) -> Any:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and child.id not in CONSTANTS:
            raise ValueError(f"{child.id} is not a value")
    return ast.literal_eval(_ConstantNames().visit(node))


class _ConstantNames(ast.NodeTransformer):
    """Reads JSON's three words as the values that they name."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        """Return the value in place of its name."""
        return ast.copy_location(ast.Constant(CONSTANTS[node.id]), node)
