"""The facade: one object that loads a model and answers requests on the event loop it was started in."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aserve.config import EngineConfig
from aserve.engine.collector import Collector
from aserve.engine.grammar_queue import GrammarQueue
from aserve.engine.output_stream import OutputStream
from aserve.engine.parts import EngineParts, close_unwanted, load_parts, run_in_thread
from aserve.engine.process_tuning import ProcessTuning
from aserve.engine.prompt_encoder import Prompt, PromptEncoder
from aserve.engine.request_check import RequestCheck
from aserve.engine.sink import Sink
from aserve.engine.stall_watch import StallWatch
from aserve.engine.stats import EngineStats
from aserve.engine.step_loop import StepLoop
from aserve.engine.trace import TraceRing, default_trace_path, make_scheduler, scheduler_settings
from aserve.errors import AserveError, CapacityError, EngineDeadError
from aserve.metrics import Metrics
from aserve.request import FinishReason, Request, RequestOutput, SamplingParams
from aserve.runner.base import ModelRunner
from aserve.scheduler.limits import Limits
from aserve.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class AsyncEngine:
    """Load a model, then ``generate``; use as an async context manager or with ``start`` and ``stop``.

    Everything but ``start``, ``stop``, ``drain`` and ``encode`` returns at once. All calls belong on the event
    loop's thread.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        runner: ModelRunner | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Take a runner or tokenizer that exists already, or leave both to ``config``."""
        self.config = config or EngineConfig()
        self.failure: Exception | None = None  # what ended the engine, if anything did
        self.metrics = Metrics(self.config.served_model_name or self.config.model or "")
        self._given = (runner, tokenizer)
        self._parts: EngineParts | None = None
        self._encoder: PromptEncoder | None = None
        self._grammars: GrammarQueue | None = None
        self._steps: StepLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._check: RequestCheck | None = None
        self._watch: StallWatch | None = None
        self._tuning = ProcessTuning()
        self._is_started = False
        self._is_draining = False
        self._is_stopped = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def is_ready(self) -> bool:
        """True while requests are accepted: warm, alive, not draining, and no step is stuck."""
        return self._steps is not None and self.is_alive and not self._is_draining and not self.is_stalled

    @property
    def is_alive(self) -> bool:
        """False once the engine has failed or was stopped; True while it loads."""
        return self.failure is None and not self._is_stopped

    @property
    def is_stalled(self) -> bool:
        """True while the device has been at one step for longer than ``step_timeout_s``."""
        return self.step_wait_s > self.config.step_timeout_s

    @property
    def step_wait_s(self) -> float:
        """For how long the device has been at its present step; 0 while it has none."""
        return self._steps.waited_s() if self._steps is not None else 0.0

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self._loaded().model_name

    @property
    def limits(self) -> Limits:
        """What the model on its device allows."""
        return self._loaded().runner.limits

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded().tokenizer

    @property
    def prompts(self) -> PromptEncoder:
        """What encodes prompts; raises what a new request must be told while none is accepted."""
        self._check_accepting()
        assert self._encoder is not None
        return self._encoder

    async def start(self) -> None:
        """Load the model in a thread, run the warm-up steps and start the step loop.

        Raises ConfigError if settings, model and machine do not go together.
        """
        if self._is_started or self._is_stopped:
            raise EngineDeadError("an engine starts only once")
        self._is_started = True
        loading = run_in_thread(lambda: load_parts(self.config, *self._given), "aserve-load")
        try:
            parts = await asyncio.wrap_future(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(close_unwanted)
            raise
        if self._is_stopped:
            await asyncio.wrap_future(run_in_thread(parts.runner.close, "aserve-close"))
            raise EngineDeadError("the engine was stopped while it was loading")
        self._tuning.apply()
        limits = parts.runner.limits
        settings = scheduler_settings(self.config, limits, parts.tokenizer.eos_token_ids)
        scheduler = make_scheduler(settings)
        trace = TraceRing(scheduler, settings, self.config.trace_steps)
        self._parts = parts
        self._encoder = PromptEncoder(
            parts.tokenizer,
            limits.max_model_len,
            max_queued_requests=self.config.max_queued_requests,
            num_waiting=lambda: scheduler.num_waiting,
        )
        self._grammars = GrammarQueue(parts.compiler, parts.runner)
        self._check = RequestCheck(limits)
        self._steps = StepLoop(
            scheduler, parts.runner, self.metrics, trace, overlap=self.config.overlap, tuning=self._tuning
        )
        self.metrics.model_name = parts.model_name
        self.metrics.add_source(lambda: self.stats().gauges())
        self._task = asyncio.create_task(self._steps.run(self._fail), name="aserve-step-loop")
        self._watch = StallWatch(self._steps.waited_s, self.config.step_timeout_s, self._try_dump_trace)
        logger.info("%s is ready: %s", parts.model_name, limits)

    async def stop(self) -> None:
        """End open requests with EngineDeadError and release the device. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._watch is not None:
            self._watch.stop()
        if self._steps is None or self._task is None:
            return
        self._steps.stop()
        await self._task
        self._fail_open(EngineDeadError("the engine was stopped"), FinishReason.ABORT)
        self._tuning.undo()
        closing = asyncio.wrap_future(run_in_thread(self._close_parts, "aserve-close"))
        try:
            await asyncio.wait_for(asyncio.shield(closing), CLOSE_TIMEOUT_S)
        except TimeoutError:
            logger.error("the device did not finish its steps within %g s and is left alone", CLOSE_TIMEOUT_S)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what is new until the request ends; leaving the generator early aborts the request.

        ``prompt`` is text, token ids or chat messages. A consumer slower than the model gets fewer, longer outputs.
        Raises ClientError, CapacityError or EngineDeadError.
        """
        request = await self._make_request(prompt, params, request_id, priority)
        collector = Collector()
        self.add(request, collector)
        try:
            finish_reason = None
            while finish_reason is None:
                output = await collector.get()
                finish_reason = output.finish_reason
                yield output
        finally:
            if not collector.is_finished:
                self.abort(request.request_id)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """Return all that ``generate`` would yield as one output; cheaper, since nobody wakes up for each token.

        Cancelling aborts the request. Raises what ``generate`` raises.
        """
        request = await self._make_request(prompt, params, request_id, priority)
        collector = Collector(is_whole=True)
        self.add(request, collector)
        try:
            return await collector.get()
        finally:
            if not collector.is_finished:
                self.abort(request.request_id)

    async def _make_request(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> Request:
        """Encode the prompt and compile the grammar; the time of arrival is now."""
        arrival_time_s = time.monotonic()
        params = params or SamplingParams()
        await self.prepare(params)
        return Request(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=tuple(await self.encode(prompt)),
            params=params,
            priority=priority,
            arrival_time_s=arrival_time_s,
        )

    async def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the token ids of a prompt, off the loop.

        Messages go through the chat template, which gets ``tools`` and the variables ``template_kwargs``;
        ``continue_final_message`` leaves the last one open instead of starting an answer. ``add_special_tokens`` adds
        BOS to text where the vocabulary asks for it. Raises ClientError for what cannot be encoded or is too long, and
        CapacityError if as many as the queue holds wait already.
        """
        return await self.prompts.encode(prompt, tools, continue_final_message, template_kwargs, add_special_tokens)

    async def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of ``params``, if there is one, off the loop.

        To be awaited before ``add``. Raises ClientError for what is wrong with the grammar, CapacityError if too many
        others wait to be compiled.
        """
        if params.grammar is not None:
            self._check_accepting()
            assert self._grammars is not None
            await self._grammars.compile(params.grammar)

    def add(self, request: Request, sink: Sink) -> None:
        """Queue ``request``; its outputs go straight to ``sink``. A grammar that was not prepared holds up a step.

        Raises ClientError (the request is wrong or can never fit), CapacityError or EngineDeadError.
        """
        steps = self._check_accepting()
        assert self._check is not None
        request = self._check.admit(request, steps.streams)
        steps.add(request, OutputStream(request, sink, self.tokenizer, self.metrics))

    def abort(self, request_id: str) -> bool:
        """End a request now; its sink gets a last output with finish reason ABORT. False if it is not open."""
        stream = self._steps.abort(request_id) if self._steps is not None else None
        if stream is None or stream.is_finished:
            return False
        self.metrics.num_aborts += 1
        stream.abort(time.monotonic())
        return True

    def end_lease(self, holder: str) -> None:
        """Give up the pages that were kept for ``holder``, the ``lease`` of its requests. Idempotent."""
        if self._steps is not None and self.failure is None:  # after a failure the scheduler cannot be trusted
            self._steps.end_lease(holder)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones; fail those still open after ``timeout_s``.

        Returns True if all of them ended by themselves.
        """
        self._is_draining = True
        if self._steps is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._steps.is_empty.wait()
        except TimeoutError:
            self._fail_open(CapacityError("the server is shutting down"), FinishReason.ABORT)
            return False
        return self.is_alive

    def stats(self) -> EngineStats:
        """Return counts of requests, pages and steps."""
        steps = self._running_steps()
        scheduler = steps.scheduler.stats()
        return EngineStats(
            is_ready=self.is_ready,
            is_alive=self.is_alive,
            num_open=len(steps.streams),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_aborts=self.metrics.num_aborts,
            num_steps=self.metrics.num_steps,
            num_late_compilations=self._loaded().runner.num_late_compilations,
            num_idle_launches=self._loaded().runner.num_idle_launches,
            scheduler=scheduler,
        )

    def dump_trace(self, path: Path | None = None) -> Path:
        """Write the recorded steps for ``aserve replay`` and return where; they contain the prompts' token ids.

        Default: ``trace_file`` of the settings, else a file in the cache folder.
        """
        path = path or default_trace_path(self.config.trace_file)
        self._running_steps().trace.dump(path)
        return path

    def _loaded(self) -> EngineParts:
        if self._parts is None:
            raise CapacityError("the model is still loading")
        return self._parts

    def _running_steps(self) -> StepLoop:
        if self._steps is None:
            raise CapacityError("the model is still loading")
        return self._steps

    def _check_accepting(self) -> StepLoop:
        """Return the step loop, or raise what a new request must be told."""
        if self.failure is not None:
            raise EngineDeadError("the engine has failed") from self.failure
        if self._is_stopped:
            raise EngineDeadError("the engine was stopped")
        if self._is_draining:
            raise CapacityError("the server is shutting down")
        return self._running_steps()

    def _fail(self, error: Exception) -> None:
        """End every open request with the failure of a step, and leave a trace."""
        self.failure = error
        if self._watch is not None:
            self._watch.stop()
        dead = EngineDeadError(f"the engine has failed: {error}")
        dead.__cause__ = error
        self._fail_open(dead, FinishReason.ERROR)
        self._running_steps().trace.record_failure(error)
        self._try_dump_trace()

    def _fail_open(self, error: AserveError, reason: FinishReason) -> None:
        """End all open requests with ``error``."""
        assert self._steps is not None
        now = time.monotonic()
        for request_id in list(self._steps.streams):
            # After a failure the scheduler's state cannot be trusted any more.
            stream = self._steps.remove(request_id) if self.failure else self._steps.abort(request_id, reason)
            if stream is not None and not stream.is_finished:
                self.metrics.num_aborts += reason is FinishReason.ABORT
                stream.break_off(error, now, reason)

    def _try_dump_trace(self) -> None:
        try:
            logger.error("the last steps are in %s; see `aserve replay`", self.dump_trace())
        except OSError as error:
            logger.error("the last steps could not be written: %s", error)

    def _close_parts(self) -> None:
        assert self._parts is not None
        assert self._encoder is not None
        assert self._grammars is not None
        self._encoder.close()
        self._grammars.close()
        self._parts.runner.close()
