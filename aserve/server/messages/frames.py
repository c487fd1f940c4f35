"""Events of a streamed answer of /v1/messages as bytes; pure.

``message_start``, then for each block ``content_block_start``, its deltas and ``content_block_stop``, then
``message_delta`` and ``message_stop``; ``ping`` anywhere in silence.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aserve.errors import AserveError
from aserve.parsing.answer_reader import AnswerDelta, AnswerReader, PartEnd, ReasoningPart
from aserve.parsing.deltas import ReasoningDelta, TextDelta, ToolCallStart
from aserve.request import RequestOutput
from aserve.server.errors import report_error
from aserve.server.messages.answer import MessagesAnswer
from aserve.server.messages.content import call_block, signature_of
from aserve.server.messages.errors import messages_error
from aserve.server.sse import encode_text, named_event

PING = named_event("ping", {})
DELTA_START = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":'
TEXT_DELTA = b'"text_delta","text":'
THINKING_DELTA = b'"thinking_delta","thinking":'
SIGNATURE_DELTA = b'"signature_delta","signature":'
INPUT_DELTA = b'"input_json_delta","partial_json":'
DELTA_END = b"}}\n\n"
TEXT_BLOCK = {"type": "text", "text": ""}
THINKING_BLOCK = {"type": "thinking", "thinking": "", "signature": ""}


class MessagesFrames:
    """The events after ``message_start``. Without ``reader`` all text is one block."""

    def __init__(self, answer: MessagesAnswer, http_request_id: str, reader: AnswerReader | None = None) -> None:
        self._answer = answer
        self._http_request_id = http_request_id
        self._reader = reader
        self._is_open = False  # the newest block
        self._index = -1  # of the newest block
        self._delta_start = b""

    def opening(self, num_prompt_tokens: int) -> bytes:
        """Return the event that comes first."""
        return named_event("message_start", {"message": self._answer.started(num_prompt_tokens)})

    def frames(self, output: RequestOutput) -> Sequence[bytes]:
        """Return one frame, with several events where parts begin and end, or none."""
        if self._reader is not None:
            frame = b"".join([self._event(delta) for delta in self._reader.read(output)])
        else:
            frame = self._text(output.text) if output.text else b""
        if output.finish_reason is not None:
            frame += self._ending(output)
        return (frame,) if frame else ()

    def failure_frames(self, error: AserveError) -> Sequence[bytes]:
        """Return an error event."""
        return (named_event("error", messages_error(report_error(error), self._http_request_id)),)

    def _event(self, delta: AnswerDelta) -> bytes:
        if isinstance(delta, TextDelta):
            return self._text(delta.text)
        if isinstance(delta, ReasoningDelta):
            start = b"" if self._is_open else self._start(THINKING_BLOCK)
            return start + self._delta(THINKING_DELTA, delta.text) if self._answer.request.shows_thinking else start
        if isinstance(delta, PartEnd):
            part = delta.part
            signed = self._delta(SIGNATURE_DELTA, signature_of(part)) if isinstance(part, ReasoningPart) else b""
            return signed + self._stop()
        if isinstance(delta, ToolCallStart):
            return self._start(call_block(delta.id, delta.name, {}))
        return self._delta(INPUT_DELTA, delta.text)

    def _text(self, text: str) -> bytes:
        start = b"" if self._is_open else self._start(TEXT_BLOCK)
        return start + self._delta(TEXT_DELTA, text)

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._is_open = True
        self._index += 1
        self._delta_start = DELTA_START % self._index
        return named_event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, kind: bytes, text: str) -> bytes:
        return self._delta_start + kind + encode_text(text) + DELTA_END

    def _stop(self) -> bytes:
        self._is_open = False
        return named_event("content_block_stop", {"index": self._index})

    def _ending(self, last: RequestOutput) -> bytes:
        stop = self._stop() if self._is_open else b""
        fields = {"delta": self._answer.ending(last, self._reader), "usage": self._answer.usage(last, self._reader)}
        return stop + named_event("message_delta", fields) + named_event("message_stop", {})
