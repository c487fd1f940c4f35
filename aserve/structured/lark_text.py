"""A grammar in Lark's notation, as llguidance reads it, built rule by rule."""

import json
import re
from collections.abc import Hashable, Mapping

ANY_TEXT = r"/(.|\n)*/"


class LarkText:
    """Rules get their names in the order in which they are added. Markers in ``token_ids`` become their tokens."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self.shared: dict[Hashable, str] = {}  # names of rules that are needed more than once
        self._token_ids = token_ids
        self._markers = re.compile("|".join(map(re.escape, sorted(token_ids, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """Return an expression for exactly ``text``; nothing for an empty one."""
        parts, place = [], 0
        for marker in self._markers.finditer(text):
            parts += [_quote(text[place : marker.start()]), f"<[{self._token_ids[marker[0]]}]>"]
            place = marker.end()
        return " ".join(filter(None, [*parts, _quote(text[place:])]))

    def rule(self, expression: str) -> str:
        """Add a rule for ``expression`` and return its name."""
        return self._add("", expression)

    def terminal(self, expression: str) -> str:
        """Add a terminal, in which regular expressions may be combined, and return its name."""
        self._rules.append(f"T{len(self._rules)}: {expression}")
        return self._rules[-1].partition(":")[0]

    def until(self, marker: str) -> str:
        """Return an expression for any text up to the first ``marker``, and the marker."""
        key = ("until", marker)
        if key not in self.shared:
            if marker in self._token_ids:
                self.shared[key] = self.rule(f"{self._add('', ANY_TEXT)} {self.literal(marker)}")
            else:
                self.shared[key] = self._add(f"[suffix={_quote(marker)}]", ANY_TEXT)
        return self.shared[key]

    def ended(self, text: str, ending: str) -> str:
        """Return an expression for the terminal ``text`` up to the first ``ending``, and that."""
        return self._add(f"[suffix={_quote(ending)}]", text)

    def text(self, start: str) -> str:
        """Return the whole grammar for ``start``."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _add(self, attributes: str, expression: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
