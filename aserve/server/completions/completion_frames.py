"""Chunks of a streamed text completion as bytes; pure, one builder per choice."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aserve.errors import AserveError
from aserve.request import RequestOutput, TokenLogprobs
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
        self._prompt_frame: bytes | None = None
        self._text_start = head.chunk_start() + b'{"index":%d,"text":' % choice
        self._has_constant_end = not head.options.continuous_usage and logprobs is None
        self._text_end = b',"logprobs":null,"finish_reason":null}' + head.chunk_end()

    def prompt_renderer(self, output: RequestOutput) -> Callable[[], None]:
        """Return what builds the chunk of the prompt whose log probabilities ``output`` carries, for a thread.

        Once it has run, the next call of ``frames`` returns that chunk first. ``output`` is still to be shown, without
        those log probabilities; ``frames`` must not be called before.
        """
        assert self._logprobs is not None
        assert output.prompt_logprobs is not None
        self._head.tally.note(self._choice, output)
        return partial(self._render_prompt, self._logprobs, output.prompt_logprobs, self._head.chunk_end())

    def frames(self, output: RequestOutput) -> Sequence[bytes]:
        """Return one frame, or none if there is nothing to show yet; before it the prompt's, if it was rendered."""
        if self._prompt_frame is None:
            return self._output_frames(output)
        prompt_frame, self._prompt_frame = self._prompt_frame, None
        return (prompt_frame, *self._output_frames(output))

    def failure_frames(self, error: AserveError) -> Sequence[bytes]:
        """Return an error event."""
        return (event(report_error(error).body()),)

    def _render_prompt(
        self, shaper: CompletionLogprobs, entries: Sequence[TokenLogprobs | None], chunk_end: bytes
    ) -> None:
        logprobs = encode_json(shaper.prompt(self._echo.token_ids, entries))
        end = b',"logprobs":%b,"finish_reason":null}' % logprobs + chunk_end
        self._prompt_frame = self._text_start + encode_text(self._echo.text) + end
        self._is_started = True

    def _output_frames(self, output: RequestOutput) -> Sequence[bytes]:
        if self._is_started and self._has_constant_end and output.finish_reason is None:  # nearly every token
            text = output.text
            return (self._text_start + encode_text(text) + self._text_end,) if text else ()
        self._head.tally.note(self._choice, output)
        text = output.text if self._is_started else self._echo.text + output.text
        logprobs = self._logprobs.output(output.logprobs) if self._logprobs and output.logprobs else None
        self._is_started = True
        if not text and logprobs is None and output.finish_reason is None:
            return ()
        end = b',"logprobs":%b,"finish_reason":%b' % (encode_json(logprobs), encode_json(output.finish_reason))
        end += b"}" if output.finish_reason is None else b',"stop_reason":%b}' % encode_json(output.stop_reason)
        return (self._text_start + encode_text(text) + end + self._head.chunk_end(),)
