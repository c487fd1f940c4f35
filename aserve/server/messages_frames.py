"""Events of a streamed answer of /v1/messages as bytes; pure.

``message_start``, then for each block ``content_block_start``, its deltas and ``content_block_stop``, then
``message_delta`` and ``message_stop``; ``ping`` anywhere in silence.
"""

from collections.abc import Sequence

from aserve.errors import AserveError
from aserve.request import RequestOutput
from aserve.server.errors import report_error
from aserve.server.messages_answer import MessagesAnswer
from aserve.server.messages_errors import messages_error
from aserve.server.sse import encode_text, named_event

PING = named_event("ping", {})
TEXT_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":'
)
DELTA_END = b"}}\n\n"


class MessagesFrames:
    """The events after ``message_start``."""

    def __init__(self, answer: MessagesAnswer, http_request_id: str) -> None:
        self._answer = answer
        self._http_request_id = http_request_id
        self._index = -1  # of the open block
        self._delta_start = b""

    def opening(self, num_prompt_tokens: int) -> bytes:
        """Return the event that comes first."""
        return named_event("message_start", {"message": self._answer.started(num_prompt_tokens)})

    def frames(self, output: RequestOutput) -> Sequence[bytes]:
        """Return one frame, with several events at the beginning and the end, or none."""
        frame = b""
        if output.text:
            if self._index < 0:
                frame = self._start_text()
            frame += self._delta_start + encode_text(output.text) + DELTA_END
        if output.finish_reason is not None:
            frame += self._ending(output)
        return (frame,) if frame else ()

    def failure_frames(self, error: AserveError) -> Sequence[bytes]:
        """Return an error event."""
        fields = messages_error(report_error(error), self._http_request_id)
        return (named_event("error", fields),)

    def _start_text(self) -> bytes:
        self._index += 1
        self._delta_start = TEXT_DELTA % self._index
        return named_event("content_block_start", {"index": self._index, "content_block": {"type": "text", "text": ""}})

    def _ending(self, last: RequestOutput) -> bytes:
        stop = b"" if self._index < 0 else named_event("content_block_stop", {"index": self._index})
        fields = {"delta": self._answer.ending(last), "usage": self._answer.usage(last)}
        return stop + named_event("message_delta", fields) + named_event("message_stop", {})
