"""The sink of a request that is answered in one piece."""

from collections.abc import Callable

from aserve.errors import AserveError, EngineDeadError
from aserve.parsing.answer_reader import AnswerReader
from aserve.request import FinishReason, RequestOutput, TokenLogprobs


class CollectSink:
    """Keeps everything until the end; ``on_end`` is called once then. A ``reader`` reads the text as it comes."""

    def __init__(self, on_end: Callable[[], None], reader: AnswerReader | None = None) -> None:
        self.reader = reader
        self.error: AserveError | None = None
        self.last: RequestOutput | None = None  # its counts and finish reason are those of the whole
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self._texts: list[str] = []
        self._on_end = on_end

    @property
    def text(self) -> str:
        """The whole text, unless a reader took it."""
        return "".join(self._texts)

    def put(self, output: RequestOutput) -> None:
        """Take what is new."""
        if self.error is not None:  # aborted after ``fail``
            return
        if self.reader is None:
            self._texts.append(output.text)
        else:
            self.reader.read(output)
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.last = output
        if output.finish_reason is None:
            return
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.error = EngineDeadError("the request was ended by the server")
        self._on_end()

    def fail(self, error: AserveError) -> None:
        """Learn that there will be no answer."""
        if self.error is None:
            self.error = error
            self._on_end()
