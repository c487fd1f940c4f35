"""Doubles for tests of parsers: an answer cut at any places, and what its deltas say when they are joined."""

from collections.abc import Iterator, Sequence
from typing import Any

from aserve.parsing.deltas import ParsedDelta, ReasoningDelta, TextDelta, TextParser, ToolCallStart

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "note": {}},
    "required": ["city"],
}
TOOLS = {"get_weather": WEATHER, "get_time": {"type": "object", "properties": {}}}


def joined(deltas: Sequence[ParsedDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return text, reasoning, and names with arguments; the calls must have come in order, each begun once."""
    text, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    ids: set[str] = set()
    for delta in deltas:
        if isinstance(delta, TextDelta):
            text += delta.text
        elif isinstance(delta, ReasoningDelta):
            reasoning += delta.text
        elif isinstance(delta, ToolCallStart):
            assert delta.index == len(calls)
            assert delta.id not in ids
            ids.add(delta.id)
            calls.append((delta.name, ""))
        else:
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return text, reasoning, calls


def parse(parser: TextParser, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return what ``parser`` finds in one answer that comes in ``pieces``."""
    deltas: list[Any] = []
    for piece in pieces:
        found = parser.push(piece)
        assert all(delta.text for delta in found if not isinstance(delta, ToolCallStart)), "an empty delta"
        deltas += found
    return joined(deltas + parser.flush())


def cuts(text: str) -> Iterator[list[str]]:
    """Yield ``text`` cut once at each place, into single characters, and into pieces of two and of three."""
    for place in range(len(text) + 1):
        yield [text[:place], text[place:]]
    for size in (1, 2, 3):
        yield [text[start : start + size] for start in range(0, len(text), size)]
