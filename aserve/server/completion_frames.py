"""Chunks of a streamed text completion as bytes; pure, one builder per choice."""

from collections.abc import Sequence
from typing import Any

from aserve.errors import AserveError
from aserve.request import RequestOutput
from aserve.server.answer_head import AnswerHead
from aserve.server.errors import report_error
from aserve.server.logprobs import CompletionLogprobs, join_completion_logprobs
from aserve.server.sse import encode_json, encode_text, event


class EchoedPrompt:
    """The prompt of a choice, as far as the answer repeats it."""

    def __init__(self, text: str = "", token_ids: Sequence[int] = ()) -> None:
        self.text = text
        self.token_ids = token_ids

    def logprobs(self, shaper: CompletionLogprobs, entries: Any) -> dict[str, list[Any]]:
        """Return the ``logprobs`` object of the repeated part."""
        return shaper.prompt(self.token_ids, entries) if entries else join_completion_logprobs(())


class CompletionFrames:
    """One choice: text chunks, the last of which carries the finish reason."""

    def __init__(self, head: AnswerHead, choice: int, echo: EchoedPrompt, logprobs: CompletionLogprobs | None) -> None:
        self._head = head
        self._choice = choice
        self._echo = echo
        self._logprobs = logprobs
        self._is_started = False
        self._text_start = head.chunk_start() + b'{"index":%d,"text":' % choice
        self._has_constant_end = not head.options.continuous_usage and logprobs is None
        self._text_end = b',"logprobs":null,"finish_reason":null}' + head.chunk_end()

    def frames(self, output: RequestOutput) -> Sequence[bytes]:
        """Return one frame, or none if there is nothing to show yet."""
        if self._is_started and self._has_constant_end and output.finish_reason is None:  # nearly every token
            text = output.text
            return (self._text_start + encode_text(text) + self._text_end,) if text else ()
        self._head.tally.note(self._choice, output)
        text = output.text if self._is_started else self._echo.text + output.text
        logprobs = self._shape(output)
        self._is_started = True
        if not text and logprobs is None and output.finish_reason is None:
            return ()
        reason = b"null" if output.finish_reason is None else encode_json(output.finish_reason)
        end = b',"logprobs":%b,"finish_reason":%b}' % (encode_json(logprobs), reason)
        return (self._text_start + encode_text(text) + end + self._head.chunk_end(),)

    def failure_frames(self, error: AserveError) -> Sequence[bytes]:
        """Return an error event."""
        return (event(report_error(error).body()),)

    def _shape(self, output: RequestOutput) -> dict[str, list[Any]] | None:
        if self._logprobs is None:
            return None
        parts = []
        if output.prompt_logprobs:
            parts.append(self._echo.logprobs(self._logprobs, output.prompt_logprobs))
        if output.logprobs:
            parts.append(self._logprobs.output(output.logprobs))
        return join_completion_logprobs(parts) if parts else None
