"""The text of one answer, as it comes, as typed deltas and as the parts that they add up to."""

from dataclasses import dataclass

import orjson

from aserve.parsing.answer import AnswerParser
from aserve.parsing.deltas import ParsedDelta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from aserve.parsing.reasoning_meter import ReasoningMeter
from aserve.request import FinishReason, RequestOutput


@dataclass(slots=True)
class TextPart:
    """Text for the reader of the answer."""

    text: str


@dataclass(slots=True)
class ReasoningPart:
    """What the model thought."""

    text: str


@dataclass(slots=True)
class CallPart:
    """A call. ``arguments`` are as the model wrote them: the JSON of an object, unless the answer was cut."""

    index: int
    id: str
    name: str
    arguments: str


AnswerPart = TextPart | ReasoningPart | CallPart


@dataclass(slots=True)
class PartEnd:
    """``part`` is complete: what follows belongs to another one."""

    part: AnswerPart


AnswerDelta = ParsedDelta | PartEnd


class AnswerReader:
    """Reads one answer, streamed or whole. ``parts`` are those that have ended; each ends before the next begins.

    How the answer is cut into outputs does not change the parts. Deltas are never empty, except that a call may begin
    without arguments.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self.parts: list[AnswerPart] = []
        places = parser.reasoning_places
        self._meter = None if places is None else ReasoningMeter(places)
        self._parser = parser
        self._open: AnswerPart | None = None
        self._pieces: list[str] = []  # of the open part
        self._is_ended = False

    def read(self, output: RequestOutput) -> list[AnswerDelta]:
        """Return what is new in ``output``; the last one ends the answer."""
        deltas = self._follow(self._parser.push(output.text)) if output.text else []
        if self._meter is not None:
            self._meter.note(output)
        if output.finish_reason is None:
            return deltas
        has_stopped = output.finish_reason is FinishReason.STOP and not isinstance(output.stop_reason, str)
        return deltas + self.end(has_stopped=has_stopped)

    def end(self, *, has_stopped: bool = False) -> list[AnswerDelta]:
        """Return what was held back, and the end of the last part. Idempotent.

        ``has_stopped``: the model ended the answer itself, so that a call without arguments is one that needs none.
        """
        if self._is_ended:
            return []
        self._is_ended = True
        if self._meter is not None:
            self._meter.close()
        deltas = self._follow(self._parser.flush())
        if has_stopped and isinstance(self._open, CallPart) and not self._pieces:
            deltas += self._follow([ToolCallArguments(self._open.index, "{}")])
        self._close(deltas)
        return deltas

    @property
    def num_reasoning_tokens(self) -> int:
        """How many tokens were reasoning, as far as is known; exact at the end."""
        return 0 if self._meter is None else self._meter.num_tokens

    @property
    def text(self) -> str:
        """The text of all parts that are text."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        """The text of all parts that are reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def calls(self) -> list[CallPart]:
        """All calls, in order."""
        return [part for part in self.parts if isinstance(part, CallPart)]

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, and the arguments of the last one are complete."""
        calls = self.calls
        return bool(calls) and is_object(calls[-1].arguments)

    def _follow(self, parsed: list[ParsedDelta]) -> list[AnswerDelta]:
        """Return ``parsed`` with the ends of parts in between."""
        deltas: list[AnswerDelta] = []
        for delta in parsed:
            if not self._continues(delta):
                self._close(deltas)
                self._open = _begin(delta)
            if not isinstance(delta, ToolCallStart):
                self._pieces.append(delta.text)
            deltas.append(delta)
        return deltas

    def _continues(self, delta: ParsedDelta) -> bool:
        if isinstance(delta, TextDelta):
            return isinstance(self._open, TextPart)
        if isinstance(delta, ReasoningDelta):
            return isinstance(self._open, ReasoningPart)
        return not isinstance(delta, ToolCallStart)

    def _close(self, deltas: list[AnswerDelta]) -> None:
        part = self._open
        if part is None:
            return
        text = "".join(self._pieces)
        if isinstance(part, CallPart):
            part.arguments = text
        else:
            part.text = text
        self._open = None
        self._pieces = []
        self.parts.append(part)
        deltas.append(PartEnd(part))


def _begin(delta: ParsedDelta) -> AnswerPart:
    if isinstance(delta, TextDelta):
        return TextPart("")
    if isinstance(delta, ReasoningDelta):
        return ReasoningPart("")
    assert isinstance(delta, ToolCallStart)  # arguments belong to the newest call, and follow its beginning
    return CallPart(delta.index, delta.id, delta.name, "")


def is_object(text: str) -> bool:
    """Whether ``text`` is the whole JSON of an object."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False
