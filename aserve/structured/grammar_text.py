"""From a GrammarSpec to the text that llguidance compiles, after cheap checks of form and depth."""

import json

import orjson
from llguidance import LLMatcher

from aserve.errors import ClientError
from aserve.request import GrammarSpec
from aserve.structured.answer_grammar import ANSWER, answer_to_lark
from aserve.structured.answer_rules import AnswerRules
from aserve.structured.json_schema import ANY_OBJECT, from_schema, load_json

MAX_CHOICES = 4096
LARK_KINDS = ("lark", "choice")  # their text is in Lark's notation, that of the others JSON around it


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
        case "answer":
            return from_rules(AnswerRules.of(spec))


def choice_to_lark(text: str) -> str:
    """Return the grammar of a JSON list of strings."""
    choices = load_json(text, "the list of choices")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ClientError("choices must be a list of strings", param="grammar")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ClientError(f"there must be 1 to {MAX_CHOICES} choices", param="grammar")
    if not all(choices):
        raise ClientError("a choice must not be empty", param="grammar")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def from_rules(rules: AnswerRules) -> str:
    """Return the grammar of a whole answer; what it may say instead of calls is a grammar of its own in it."""
    grammars = [{"lark_grammar": answer_to_lark(rules)}]
    if rules.answer is not None:
        spec = GrammarSpec(*rules.answer)
        text = to_llguidance(spec)
        answer = {"lark_grammar": text} if spec.kind in LARK_KINDS else orjson.loads(text)["grammars"][0]
        grammars.append({**answer, "name": ANSWER})
    return orjson.dumps({"grammars": grammars}).decode()
