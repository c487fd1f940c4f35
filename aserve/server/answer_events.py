"""The outputs of one response as events: its text, or the reasoning, text and calls that a reader finds in it."""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from aserve.parsing.answer_reader import AnswerDelta, AnswerReader, PartEnd
from aserve.parsing.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from aserve.request import RequestOutput, TokenLogprobs
from aserve.server.logprobs import TokenNames, finite
from aserve.server.responses.events import Event, ResponseEvents


class AnswerEvents:
    """Reads one answer. Without a reader all of it is text."""

    __slots__ = ("_events", "_held_logprobs", "_names", "_reader")

    def __init__(self, events: ResponseEvents, reader: AnswerReader | None, names: TokenNames) -> None:
        self._events = events
        self._reader = reader
        self._names = names
        self._held_logprobs: list[Mapping[str, Any]] = []  # of tokens whose text is still held back

    @property
    def num_reasoning_tokens(self) -> int:
        """How many tokens so far were reasoning."""
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    def read(self, output: RequestOutput) -> list[Event]:
        """Return the events for what is new in ``output``."""
        if output.logprobs:
            self._held_logprobs += render_logprobs(self._names, output.logprobs)
        if self._reader is not None:
            return self._found(self._reader.read(output))
        if output.text or (output.finish_reason is not None and self._held_logprobs):
            return self._text(output.text)
        return []

    def end(self) -> list[Event]:
        """Return the events for what was held back, at the end of an answer that has no last output."""
        return [] if self._reader is None else self._found(self._reader.end())

    def _found(self, deltas: Sequence[AnswerDelta]) -> list[Event]:
        events: list[Event] = []
        shown = [delta for delta in deltas if not isinstance(delta, PartEnd)]
        for delta in shown:
            if isinstance(delta, TextDelta):
                events += self._text(delta.text, is_newest=delta is shown[-1])
            elif isinstance(delta, ReasoningDelta):
                events += self._events.reasoning(delta.text)
            elif isinstance(delta, ToolCallStart):
                events += self._events.begin_call(delta.id, delta.name)
            elif isinstance(delta, ToolCallArguments):
                events += self._events.arguments(delta.text)
        if shown and not isinstance(shown[-1], TextDelta):
            self._held_logprobs.clear()  # those of tokens that are no text
        return events

    def _text(self, text: str, *, is_newest: bool = True) -> list[Event]:
        return self._events.delta(text, self._take_logprobs(text, is_newest=is_newest) if self._held_logprobs else ())

    def _take_logprobs(self, text: str, *, is_newest: bool) -> list[Mapping[str, Any]]:
        """Return the entries of the tokens that say ``text``, and drop those before: markers and white space.

        Reasoning, calls and markers may say the same; the newest text stands behind them.
        """
        held = self._held_logprobs
        spelled = b"".join(bytes(entry["bytes"]) for entry in held)
        find = spelled.rfind if is_newest else spelled.find
        start = find(text.encode(errors="replace")) if self._reader is not None and text else -1
        if start < 0:
            self._held_logprobs = []
            return held
        end = start + len(text.encode())
        ends = list(itertools.accumulate(len(entry["bytes"]) for entry in held))
        first, last = bisect.bisect_right(ends, start), bisect.bisect_left(ends, end)
        self._held_logprobs = held[last + 1 :]
        return held[first : last + 1]


def render_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Return the JSON form of ``entries``, one for each token."""
    return [
        {
            **_render_token(names, entry.token_id, entry.logprob),
            "top_logprobs": [_render_token(names, token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]


def _render_token(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    shown = names.visible_bytes(token_id) or b""
    return {"token": names.name(token_id), "bytes": list(shown), "logprob": finite(logprob)}
