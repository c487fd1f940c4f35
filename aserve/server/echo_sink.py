"""The sink of a streamed completion that repeats its prompt with log probabilities."""

import asyncio
import logging
from collections.abc import Callable

from aserve.errors import AserveError, EngineDeadError
from aserve.request import RequestOutput
from aserve.server.completions.completion_frames import CompletionFrames
from aserve.server.stream_sink import Outlet, StreamSink

logger = logging.getLogger(__name__)


class EchoSink(StreamSink):
    """Has the prompt's chunk built in a thread: thousands of entries would hold up the event loop.

    What comes in meanwhile is merged into one output.
    """

    __slots__ = ("_frames", "_held")

    def __init__(self, outlet: Outlet, builder: CompletionFrames, on_end: Callable[[], None]) -> None:
        super().__init__(outlet, builder, on_end)
        self._frames = builder
        self._held: RequestOutput | None = None  # while the thread runs

    def put(self, output: RequestOutput) -> None:
        """Write ``output``; the one with the prompt's log probabilities, and what follows it, once those are ready."""
        if self._held is not None:
            self._held.merge(output)
        elif output.prompt_logprobs:
            rendering = asyncio.get_running_loop().run_in_executor(None, self._frames.prompt_renderer(output))
            output.prompt_logprobs = None
            self._held = output
            rendering.add_done_callback(self._release)
        else:
            super().put(output)

    def fail(self, error: AserveError) -> None:
        """End the stream with an error frame now; a prompt that is not ready is left out."""
        self._held = None
        super().fail(error)

    def _release(self, rendering: "asyncio.Future[None]") -> None:
        held, self._held = self._held, None
        if rendering.cancelled() or held is None:
            return
        if (error := rendering.exception()) is not None:
            logger.error("a prompt's log probabilities could not be shown", exc_info=error)
            super().fail(EngineDeadError("the log probabilities of the prompt could not be shown"))
        else:
            super().put(held)
