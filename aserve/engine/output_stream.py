"""The last leg of a request before its sink: token ids become text, stop strings end it, totals are kept.

One per request, called by the step loop on the event loop's thread. Knows neither scheduler nor sockets.
"""

from aserve.engine.sink import Sink
from aserve.errors import AserveError
from aserve.metrics import Metrics
from aserve.request import FinishReason, Request, RequestOutput
from aserve.scheduler.delta import SequenceDelta
from aserve.tokenizer.stop_strings import StopStringFilter
from aserve.tokenizer.tokenizer import Tokenizer


class OutputStream:
    """Turns the deltas of one sequence into outputs of one request, and puts them into its sink."""

    __slots__ = (
        "_detokenizer",
        "_ending_is_shown",
        "_is_started",
        "_last_token_s",
        "_metrics",
        "_stops",
        "is_finished",
        "num_cached_tokens",
        "num_output_tokens",
        "request",
        "sink",
    )

    def __init__(self, request: Request, sink: Sink, tokenizer: Tokenizer, metrics: Metrics) -> None:
        params = request.params
        self.request = request
        self.sink = sink
        self.is_finished = False  # the sink has had its last call
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self._metrics = metrics
        self._detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
        self._stops = StopStringFilter(params.stop) if params.stop else None
        self._ending_is_shown = params.include_stop_str_in_output
        self._is_started = False
        self._last_token_s = 0.0  # when the newest token was committed

    def note_start(self, now: float) -> None:
        """Note that a step with the first of its prompt is launched; a restart after preemption changes nothing."""
        if not self._is_started:
            self._is_started = True
            self._metrics.queue_time.observe(now - self.request.arrival_time_s)

    def deliver(self, delta: SequenceDelta, now: float) -> bool:
        """Pass on what a step brought at time ``now``; True if a stop string ended the request just now."""
        if self.is_finished:  # a stop string matched or the request was aborted while this delta waited
            return False
        if delta.error is not None:
            self.fail(AserveError(delta.error), now)
            return False
        token_ids = delta.token_ids
        finish_reason = delta.finish_reason
        stop_reason: str | int | None = None
        self.num_cached_tokens = delta.num_cached_tokens
        if delta.stop_token_id is not None and delta.stop_token_id in self.request.params.stop_token_ids:
            stop_reason = delta.stop_token_id
        if self._stops is None:
            text = self._detokenizer.push(self._visible(token_ids, delta))
            if finish_reason is not None:
                text += self._detokenizer.flush()
            count = len(token_ids)
        else:
            text, count, stop = self._filter(self._visible(token_ids, delta), finish_reason is not None)
            if stop is None:
                count = len(token_ids)
            else:
                finish_reason, stop_reason = FinishReason.STOP, stop
        self._count_tokens(count, now)
        self._put(
            RequestOutput(
                self.request.request_id,
                text,
                token_ids if count == len(token_ids) else token_ids[:count],
                len(self.request.prompt_token_ids),
                self.num_output_tokens,
                self.num_cached_tokens,
                finish_reason,
                stop_reason,
                delta.logprobs if delta.logprobs is None else delta.logprobs[:count],
                delta.prompt_logprobs,
            ),
            now,
        )
        return finish_reason is not None and delta.finish_reason is None

    def abort(self, now: float) -> None:
        """End with finish reason ABORT and whatever text is still held back."""
        if not self.is_finished:
            text = self._detokenizer.flush()
            if self._stops is not None:
                text = self._stops.push(text)[0] + self._stops.flush()
            self._put(self._empty_output(text, FinishReason.ABORT), now)

    def fail(self, error: AserveError, now: float, reason: FinishReason = FinishReason.ERROR) -> None:
        """End with ``error`` in place of a last output; ``reason`` is what the metrics count."""
        if not self.is_finished:
            self._finish(reason, now)
            self.sink.fail(error)

    def _visible(self, token_ids: list[int], delta: SequenceDelta) -> list[int]:
        """Leave out the token that ended the request, unless it was asked for."""
        hides_last = delta.stop_token_id is not None and not self._ending_is_shown
        return token_ids[:-1] if hides_last else token_ids

    def _filter(self, token_ids: list[int], is_last: bool) -> tuple[str, int, str | None]:
        """Return ``(text to show, tokens up to the match, stop string)``.

        Tokens go in one by one, so that they can be counted. The first ``min_tokens`` cannot be part of a stop string.
        """
        assert self._stops is not None
        pieces: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            text = self._detokenizer.push([token_id])
            if self.num_output_tokens + count <= self.request.params.min_tokens:
                pieces.append(text)
                continue
            shown, stop = self._stops.push(text)
            pieces.append(shown)
            if stop is not None:
                return self._cut(pieces, stop), count, stop
        if is_last:
            shown, stop = self._stops.push(self._detokenizer.flush())
            pieces.append(shown)
            if stop is not None:
                return self._cut(pieces, stop), len(token_ids), stop
            pieces.append(self._stops.flush())
        return "".join(pieces), len(token_ids), None

    def _cut(self, pieces: list[str], stop: str) -> str:
        return "".join(pieces) + (stop if self._ending_is_shown else "")

    def _count_tokens(self, count: int, now: float) -> None:
        """Keep totals and times; the tokens of one step share its time."""
        if count == 0:
            return
        metrics = self._metrics
        metrics.num_generation_tokens += count
        if self.num_output_tokens == 0:
            metrics.time_to_first_token.observe(now - self.request.arrival_time_s)
            metrics.num_prompt_tokens += len(self.request.prompt_token_ids)
            metrics.num_cached_tokens += self.num_cached_tokens
        else:
            metrics.inter_token.observe(now - self._last_token_s)
        self.num_output_tokens += count
        self._last_token_s = now

    def _put(self, output: RequestOutput, now: float) -> None:
        if output.finish_reason is not None:
            self._finish(output.finish_reason, now)
        self.sink.put(output)

    def _finish(self, reason: FinishReason, now: float) -> None:
        self.is_finished = True
        num_prompt = len(self.request.prompt_token_ids)
        self._metrics.record_finish(reason, num_prompt, self.num_output_tokens, now - self.request.arrival_time_s)

    def _empty_output(self, text: str, reason: FinishReason) -> RequestOutput:
        return RequestOutput(
            self.request.request_id,
            text,
            [],
            len(self.request.prompt_token_ids),
            self.num_output_tokens,
            self.num_cached_tokens,
            reason,
        )
