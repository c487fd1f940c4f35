"""Chunks of a streamed chat completion as bytes; pure, one builder per choice."""

from collections.abc import Sequence

from aserve.errors import AserveError
from aserve.parsing.answer_reader import AnswerReader
from aserve.request import RequestOutput, TokenLogprobs
from aserve.server.answer_head import AnswerHead
from aserve.server.completions.chat_message import finish_reason_of, render_delta
from aserve.server.errors import report_error
from aserve.server.logprobs import TokenNames, chat_logprobs
from aserve.server.sse import encode_json, encode_text, event

ROLE = b'{"role":"assistant","content":""}'
NO_DELTA = b"{}"


class ChatFrames:
    """One choice: a role chunk, chunks of what is new, a finish chunk. Without ``reader`` all text is content.

    Log probabilities of tokens that show nothing yet, as those of a marker, come with the next chunk.
    """

    def __init__(self, head: AnswerHead, choice: int, names: TokenNames, reader: AnswerReader | None = None) -> None:
        self._head = head
        self._choice = choice
        self._names = names
        self._reader = reader
        self._is_started = False
        self._held_logprobs: list[TokenLogprobs] = []
        self._start = head.chunk_start() + b'{"index":%d,"delta":' % choice
        self._content_start = self._start + b'{"content":'
        self._has_constant_end = not head.options.continuous_usage and head.options.params.logprobs is None
        self._end = b',"logprobs":null,"finish_reason":null}' + head.chunk_end()
        self._content_end = b"}" + self._end

    def frames(self, output: RequestOutput) -> Sequence[bytes]:
        """Return one frame, with several chunks at the beginning and the end, or none."""
        if self._has_constant_end and self._is_started and output.finish_reason is None:
            if self._reader is not None:
                deltas = self._deltas(self._reader, output)
                return (b"".join([self._start + delta + self._end for delta in deltas]),) if deltas else ()
            text = output.text  # nearly every token
            return (self._content_start + encode_text(text) + self._content_end,) if text else ()
        return self._rare_frames(output)

    def failure_frames(self, error: AserveError) -> Sequence[bytes]:
        """Return an error event."""
        return (event(report_error(error).body()),)

    def _deltas(self, reader: AnswerReader, output: RequestOutput) -> list[bytes]:
        return [rendered for delta in reader.read(output) if (rendered := render_delta(delta))]

    def _rare_frames(self, output: RequestOutput) -> Sequence[bytes]:
        """Return the frames of the first output, of the last, and of those with more than text."""
        reader, reason = self._reader, output.finish_reason
        if reader is not None:
            deltas = self._deltas(reader, output)
            self._head.tally.note_reasoning(self._choice, reader.num_reasoning_tokens)
        else:
            deltas = [b'{"content":%b}' % encode_text(output.text)] if output.text or output.logprobs else []
        self._head.tally.note(self._choice, output)
        frame = b"" if self._is_started else self._chunk(ROLE)
        self._is_started = True
        self._held_logprobs += output.logprobs or ()
        if reason is not None and self._held_logprobs and not deltas:
            deltas = [NO_DELTA]
        for delta in deltas:
            logprobs, self._held_logprobs = self._held_logprobs, []
            frame += self._chunk(delta, logprobs)
        if reason is not None:
            frame += self._finish_chunk(finish_reason_of(reason, reader), output.stop_reason)
        return (frame,) if frame else ()

    def _chunk(self, delta: bytes, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        scores = encode_json(chat_logprobs(logprobs, self._names)) if logprobs else b"null"
        return self._start + delta + b',"logprobs":%b,"finish_reason":null}' % scores + self._head.chunk_end()

    def _finish_chunk(self, reason: str, stop_reason: str | int | None) -> bytes:
        fields = b',"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            encode_text(reason),
            encode_json(stop_reason),
        )
        return self._start + NO_DELTA + fields + self._head.chunk_end()
