"""An answer as a whole: reasoning, then text and calls."""

from aserve.parsing.deltas import (
    ParsedDelta,
    ReasoningParser,
    TextDelta,
    TextParser,
    ToolCallArguments,
    ToolCallStart,
)
from aserve.parsing.reasoning_meter import ReasoningPlaces


class AnswerParser:
    """Lets ``reasoning`` read an answer, and ``tools`` what that takes for text; either may be missing.

    With ``max_calls``, later calls are dropped.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: TextParser | None, *, max_calls: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls

    @property
    def reasoning_places(self) -> ReasoningPlaces | None:
        """Where its reasoning stands, None if none is looked for."""
        return None if self._reasoning is None else self._reasoning.places

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        if self._reasoning is not None:
            return self._limited(self._read(self._reasoning.push(text)))
        return self._limited([TextDelta(text)] if self._tools is None else self._tools.push(text))

    def flush(self) -> list[ParsedDelta]:
        """Return what was held back."""
        deltas = self._read([] if self._reasoning is None else self._reasoning.flush())
        return self._limited(deltas + ([] if self._tools is None else self._tools.flush()))

    def _read(self, deltas: list[ParsedDelta]) -> list[ParsedDelta]:
        if self._tools is None:
            return deltas
        found: list[ParsedDelta] = []
        for delta in deltas:
            if type(delta) is TextDelta:
                found += self._tools.push(delta.text)
            else:
                found.append(delta)
        return found

    def _limited(self, deltas: list[ParsedDelta]) -> list[ParsedDelta]:
        if self._max_calls is None:
            return deltas
        return [
            delta
            for delta in deltas
            if not isinstance(delta, ToolCallStart | ToolCallArguments) or delta.index < self._max_calls
        ]
