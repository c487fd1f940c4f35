"""The jinja2 environment of chat templates: sandboxed, with the names they expect, and bounded.

Templates come with models from anywhere. They can reach plain data only, and a render ends with an
error after MAX_ITERATIONS rounds of loops and macros or ``max_chars`` of output.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from aserve.tokenizer.control_tokens import ControlTokens, unmark_all

MAX_ITERATIONS = 500_000
MAX_REPEATED = 1_000_000  # length of the text or list that `*` may build
MAX_INTEGER_BITS = 4096
BUDGET = "aserve_iteration_budget"


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates as the model's authors tried them: with trimmed blocks, no HTML escaping."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, control_tokens: ControlTokens) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self._control_tokens = control_tokens
        self.filters["tojson"] = self._to_json
        self.filters["count_iteration"] = _count_iteration
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _format_now,
            "namespace": _PlainNamespace,
            "dict": _make_dict,
        }

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile ``source``, counting the rounds of its loops and macros; raise TemplateSyntaxError."""
        tree = self.parse(source)
        loops: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for block in loops:
            count = nodes.Filter(nodes.Const(None), "count_iteration", [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(count).set_lineno(block.lineno))
        code = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def render(
        self,
        template: jinja2.Template,
        variables: dict[str, Any],
        max_chars: int,
        max_iterations: int = MAX_ITERATIONS,
    ) -> str:
        """Render ``template``; raise TemplateError beyond ``max_chars``, or ``max_iterations`` of loops and macros."""
        pieces, num_chars = [], 0
        for piece in template.generate({**variables, BUDGET: _Budget(max_iterations)}):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_chars:
                raise OutputTooLongError(max_chars)
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse products and powers whose value would be huge."""
        if _is_huge(operator, left, right):
            raise jinja2.TemplateRuntimeError(f"'{operator}' makes too large a value")
        return super().call_binop(context, operator, left, right)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Dump without HTML escapes, which is what models were trained on; marks would not survive ``ensure_ascii``."""
        text = json.dumps(
            unmark_all(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self._control_tokens.mark(text)


class OutputTooLongError(jinja2.TemplateRuntimeError):
    """The rendered text has more characters than allowed."""

    def __init__(self, max_chars: int) -> None:
        super().__init__(f"the rendered text is longer than {max_chars} characters")


class _Budget:
    """The rounds that one render has left."""

    __slots__ = ("_left", "_max_iterations")

    def __init__(self, max_iterations: int) -> None:
        self._left = self._max_iterations = max_iterations

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise jinja2.TemplateRuntimeError(f"it loops more than {self._max_iterations} times")


@pass_context
def _count_iteration(context: Context, _value: None) -> None:
    """Count one round of a loop or one call of a macro; compiled into each."""
    context.parent[BUDGET].spend()


def _is_huge(operator: str, left: Any, right: Any) -> bool:
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple) and isinstance(times, int):
            return len(repeated) * times > MAX_REPEATED
    if not (isinstance(left, int) and isinstance(right, int)):
        return False
    num_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    return num_bits > MAX_INTEGER_BITS


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the model's words for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _PlainNamespace(Namespace):
    """A namespace without underscore names, which would reach into Python's own attributes."""

    def __init__(self, *pairs: Any, **values: Any) -> None:
        super().__init__()
        for name, value in dict(*pairs, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateRuntimeError(f"a namespace cannot hold the name {name!r}")
        super().__setitem__(name, value)


def _make_dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    return dict(*pairs, **values)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
