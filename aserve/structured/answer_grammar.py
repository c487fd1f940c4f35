"""The grammar of a whole answer from its rules: reasoning first, then calls, an answer in its own form, or text."""

import re

from aserve.errors import ClientError
from aserve.structured.answer_rules import AnswerRules
from aserve.structured.call_syntax import CALL_SYNTAXES, CallSyntax, Parameters
from aserve.structured.lark_text import ANY_TEXT, LarkText

ANSWER = "answer"  # the name of the grammar for what is said instead of calls
ANYTHING = "start: <[*]>*\n"  # control tokens, too
BEHIND_REASONING = r"/[\n]{0,2}/"


def answer_to_lark(rules: AnswerRules) -> str:
    """Return the grammar of ``rules``, in which ``@answer`` stands for their answer."""
    if rules.allows_anything:
        return ANYTHING
    lark = LarkText(rules.token_ids)
    body = _body(lark, rules)
    return lark.text(f"{_reasoning(lark, rules)} {lark.rule(body)}")


def _reasoning(lark: LarkText, rules: AnswerRules) -> str:
    if rules.is_harmony:
        opening = lark.literal("<|channel|>analysis<|message|>")
        closing = f"{lark.until('<|end|>')} {lark.literal('<|start|>assistant')}"
        return f"({opening} {closing})?"
    markers = rules.reasoning
    if markers is None:
        return ""
    rest = f"{lark.until(markers.closing)} {BEHIND_REASONING}"
    return rest if markers.is_open else f"({lark.literal(markers.opening)} {rest})?"


def _body(lark: LarkText, rules: AnswerRules) -> str:
    said = f"@{ANSWER}" if rules.answer is not None else ANY_TEXT
    if rules.is_harmony:
        said = f"{lark.literal('<|channel|>final<|message|>')} {said}"
    if not rules.functions:
        return said
    syntax = CALL_SYNTAXES.get(rules.syntax)
    if syntax is None:
        raise ClientError(f"calls cannot be enforced in the syntax {rules.syntax!r}", param="grammar")
    functions = _functions(rules, syntax)
    if rules.must_call:
        return syntax.calls(lark, functions, is_single=rules.is_single)
    if rules.answer is not None or rules.is_harmony:
        return f"{syntax.calls(lark, functions, is_single=rules.is_single)} | {said}"
    return _text_with_calls(lark, syntax, rules)


def _functions(rules: AnswerRules, syntax: CallSyntax) -> dict[str, Parameters]:
    """Return what each function takes; beside an answer that may begin alike, nothing but schemas can be told apart."""
    forms = {} if syntax.begins_answer and rules.answer is not None else rules.forms
    return {name: forms.get(name, schema) for name, schema in rules.functions}


def _text_with_calls(lark: LarkText, syntax: CallSyntax, rules: AnswerRules) -> str:
    functions, trigger = _functions(rules, syntax), syntax.trigger
    if syntax.begins_answer:
        calls = syntax.calls(lark, functions, is_single=rules.is_single)
        return f"{calls} | {_text_not_beginning(lark, trigger, rules)}"
    calls = syntax.calls(lark, functions, is_single=rules.is_single, skip=trigger)
    return f"({lark.until(trigger)} {calls}){'?' if rules.is_single else '*'} {lark.rule(ANY_TEXT)}"


def _text_not_beginning(lark: LarkText, trigger: str, rules: AnswerRules) -> str:
    """Return an expression for text that nobody could take for calls, nor for reasoning with calls behind it."""
    text = rf"/[^\{trigger};\s](.|\n)*/"
    if rules.reasoning is not None:
        text = f"{text} & ~/{re.escape(rules.reasoning.opening).replace('/', chr(92) + '/')}(.|\n)*/"
    return f'({lark.terminal(text)} | "")'
