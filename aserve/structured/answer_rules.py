"""What a whole answer may be: reasoning, then calls, or an answer in a form of its own, or text with calls in it."""

from typing import Any

import msgspec

from aserve.errors import ClientError
from aserve.request import GrammarKind, GrammarSpec
from aserve.structured.text_form import TextForm


class ReasoningMarkers(msgspec.Struct, frozen=True):
    """What stands around reasoning. ``is_open``: the prompt has begun it. Harmony's channels have no markers here."""

    opening: str
    closing: str
    is_open: bool = False


class AnswerRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rules of one answer, as a GrammarSpec of the kind "answer" carries them.

    ``functions`` are names with the schemas of their arguments, None for any object, written as ``syntax`` says
    (``call_syntax.py``); ``forms`` are those of functions that take one text in a form of its own. ``must_call`` rules
    out all but calls; otherwise the answer may be what ``answer``, kind and text of a grammar, says, or without one any
    text, in which calls may stand. ``is_single`` allows one call only. ``max_reasoning_tokens`` closes the reasoning
    when it has as many (``reasoning_budget.py``). ``token_ids`` are the markers that are control tokens of the model's
    vocabulary.
    """

    syntax: str = ""
    functions: tuple[tuple[str, dict[str, Any] | None], ...] = ()
    forms: dict[str, TextForm] = {}
    must_call: bool = False
    is_single: bool = False
    answer: tuple[GrammarKind, str] | None = None
    reasoning: ReasoningMarkers | None = None
    is_harmony: bool = False
    max_reasoning_tokens: int | None = None
    token_ids: dict[str, int] = {}

    @property
    def allows_anything(self) -> bool:
        """Whether nothing is said of the answer but how long its reasoning may be."""
        return not (self.functions or self.answer or self.is_harmony)

    @classmethod
    def of(cls, spec: GrammarSpec) -> "AnswerRules":
        """Return the rules that ``spec`` carries."""
        try:
            return msgspec.json.decode(spec.text, type=cls)
        except msgspec.MsgspecError as error:
            raise ClientError(f"the rules of the answer cannot be read: {error}", param="grammar") from None

    def spec(self) -> GrammarSpec:
        """Return the grammar that stands for these rules; raise ClientError if they are too long for one."""
        return GrammarSpec("answer", msgspec.json.encode(self).decode())
