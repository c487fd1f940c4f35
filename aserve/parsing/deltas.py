"""What parsers find in a model's text, piece by piece."""

from dataclasses import dataclass
from typing import Protocol

from aserve.parsing.reasoning_meter import ReasoningPlaces


@dataclass(slots=True)
class TextDelta:
    """More of the answer's own text."""

    text: str


@dataclass(slots=True)
class ReasoningDelta:
    """More of what the model thought before or between its answers."""

    text: str


@dataclass(slots=True)
class ToolCallStart:
    """A call begins; comes once for each ``index``, before its arguments."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class ToolCallArguments:
    """More of the arguments of call ``index``; joined they are the JSON text of an object."""

    index: int
    text: str


ParsedDelta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class TextParser(Protocol):
    """Reads one answer. How its text is cut into pieces does not change what the joined deltas say.

    Text that turns out to be no call, or that ends before it is one, comes out as text.
    """

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece; return what is certain now and was not before."""
        ...

    def flush(self) -> list[ParsedDelta]:
        """Return what was held back, at the end of the answer."""
        ...


class ReasoningParser(TextParser, Protocol):
    """A parser that tells reasoning from the answer; it may find calls as well."""

    places: ReasoningPlaces
