"""The form of the one text that a custom tool takes, as its client gave it, and how calls can be held to it."""

import re
from typing import Any, Literal

import msgspec

from aserve.structured.json_text import within_json_string, without_anchors
from aserve.structured.lark_regular import Grammar, NotRegularError
from aserve.structured.lark_text import LarkText

SLASH = re.compile(r"\\.|/", re.DOTALL)


class TextForm(msgspec.Struct, frozen=True):
    """What ``argument``, a text and the only argument of a function, has to match: an expression or a grammar."""

    syntax: Literal["lark", "regex"]
    definition: str
    argument: str = "input"

    def schema(self) -> dict[str, Any]:
        """Return the schema of the arguments, which says nothing of the form."""
        properties = {self.argument: {"type": "string"}}
        return {"type": "object", "properties": properties, "required": [self.argument], "additionalProperties": False}

    def quoted(self, lark: LarkText) -> str | None:
        """Return an expression for the text as a JSON string, None if it cannot be written as one.

        A grammar whose rules need themselves can be, if nothing in it has to be escaped.
        """
        if (pattern := self._pattern()) is not None:
            return lark.terminal(rf'"\"" {_slashed(within_json_string(pattern)[0])} "\""')
        nested = self._nested()
        return None if nested is None else lark.rule(rf'"\"" {nested} "\""')

    def unquoted(self, lark: LarkText, ending: str) -> str | None:
        """Return an expression for the text as it is and the ``ending`` that closes it, None as ``quoted`` does."""
        if (pattern := self._pattern()) is not None:
            other = re.escape(ending.strip())
            text = lark.terminal(f"{_slashed(pattern)} & ~{_slashed(f'(?s:.)*{other}(?s:.)*')}")
            return lark.ended(text, ending)
        nested = self._nested()
        return None if nested is None else f"{lark.rule(nested)} {lark.literal(ending)}"

    def _pattern(self) -> str | None:
        """Return one expression for the whole text, None if there is none."""
        if self.syntax == "regex":
            return without_anchors(self.definition)
        try:
            return Grammar.read(self.definition).expression("start")
        except NotRegularError:
            return None

    def _nested(self) -> str | None:
        text = Grammar.read(self.definition).without_escapes()
        return None if text is None else f"%lark {{\n{text}}}"


def _slashed(pattern: str) -> str:
    """Return ``pattern`` between slashes."""
    return f"/{SLASH.sub(lambda found: chr(92) + '/' if found[0] == '/' else found[0], pattern)}/"
