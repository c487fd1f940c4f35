"""Chunks of a streamed chat completion as bytes; pure, one builder per choice."""

from collections.abc import Sequence

from aserve.errors import AserveError
from aserve.request import RequestOutput
from aserve.server.answer_head import AnswerHead
from aserve.server.errors import report_error
from aserve.server.logprobs import TokenNames, chat_logprobs
from aserve.server.sse import encode_json, encode_text, event

ROLE = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
FINISH = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}'


class ChatFrames:
    """One choice: a role chunk, content chunks, a finish chunk."""

    def __init__(self, head: AnswerHead, choice: int, names: TokenNames) -> None:
        self._head = head
        self._choice = choice
        self._names = names
        self._is_started = False
        self._start = head.chunk_start()
        self._content_start = self._start + b'{"index":%d,"delta":{"content":' % choice
        self._has_constant_end = not head.options.continuous_usage and head.options.params.logprobs is None
        self._content_end = b'},"logprobs":null,"finish_reason":null}' + head.chunk_end()

    def frames(self, output: RequestOutput) -> Sequence[bytes]:
        """Return one frame, with several chunks at the beginning and the end, or none."""
        if self._is_started and self._has_constant_end and output.finish_reason is None:  # nearly every token
            text = output.text
            return (self._content_start + encode_text(text) + self._content_end,) if text else ()
        self._head.tally.note(self._choice, output)
        frame = b"" if self._is_started else self._chunk(ROLE % self._choice)
        self._is_started = True
        if output.text or output.logprobs:
            frame += self._content(output)
        if output.finish_reason is not None:
            frame += self._chunk(FINISH % (self._choice, output.finish_reason.encode()))
        return (frame,) if frame else ()

    def failure_frames(self, error: AserveError) -> Sequence[bytes]:
        """Return an error event."""
        return (event(report_error(error).body()),)

    def _content(self, output: RequestOutput) -> bytes:
        content = self._content_start + encode_text(output.text)
        if self._has_constant_end:
            return content + self._content_end
        logprobs = encode_json(chat_logprobs(output.logprobs, self._names)) if output.logprobs else b"null"
        return content + b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self._head.chunk_end()

    def _chunk(self, choice: bytes) -> bytes:
        return self._start + choice + self._head.chunk_end()
