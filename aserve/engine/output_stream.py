"""The last leg of a request before its sink: token ids become text, stop strings end it, totals are kept.

One per request, called by the step loop on the event loop's thread. Knows neither scheduler nor sockets.
"""

import logging
from itertools import accumulate

from aserve.engine.sink import Sink
from aserve.errors import AserveError
from aserve.metrics import Metrics
from aserve.request import FinishReason, Request, RequestOutput
from aserve.scheduler.delta import SequenceDelta
from aserve.tokenizer.stop_strings import StopStringFilter
from aserve.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class OutputStream:
    """Turns the deltas of one sequence into outputs of one request, and puts them into its sink."""

    __slots__ = (
        "_detokenizer",
        "_ending_is_shown",
        "_last_token_s",
        "_metrics",
        "_min_tokens",
        "_num_prompt_tokens",
        "_observe_gap",
        "_request_id",
        "_started_s",
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
        self._observe_gap = metrics.inter_token.observe
        kept = (params.kept_special_ids,) if params.kept_special_ids else ()
        self._detokenizer = tokenizer.detokenizer(params.skip_special_tokens, *kept)
        self._stops = StopStringFilter(params.stop) if params.stop else None
        self._ending_is_shown = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._request_id = request.request_id
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._started_s: float | None = None  # when the first step of its prompt was launched
        self._last_token_s = 0.0  # when the newest token was committed

    def note_start(self, now: float) -> None:
        """Note that a step with the first of its prompt is launched; a restart after preemption changes nothing."""
        if self._started_s is None:
            self._started_s = now
            self._metrics.queue_time.observe(now - self.request.arrival_time_s)
            self._metrics.num_prompt_tokens += self._num_prompt_tokens

    def deliver(self, delta: SequenceDelta, now: float) -> bool:
        """Pass on what a step brought at time ``now``; True if a stop string ended the request just now."""
        if self.is_finished:  # a stop string matched or the request was aborted while this delta waited
            return False
        token_ids = delta.token_ids
        num_output_tokens = self.num_output_tokens
        if delta.finish_reason is not None or len(token_ids) != 1 or not num_output_tokens:
            return self._deliver_rare(delta, now)
        # The usual case, once for each token of each stream: one more token, and the request goes on.
        text = self._detokenizer.push(token_ids)
        if self._stops is not None and num_output_tokens >= self._min_tokens:
            text, stop = self._stops.push(text)
            if stop is not None:
                self._count_tokens(1, now)
                self._put(self._output(delta, self._closed(text, stop), 1, FinishReason.STOP, stop), now)
                return True
        self.num_output_tokens = num_output_tokens = num_output_tokens + 1
        self._metrics.num_generation_tokens += 1
        self._observe_gap(now - self._last_token_s)
        self._last_token_s = now
        self.sink.put(
            RequestOutput(
                self._request_id,
                text,
                token_ids,
                self._num_prompt_tokens,
                num_output_tokens,
                self.num_cached_tokens,
                None,
                None,
                delta.logprobs,
            )
        )
        return False

    def abort(self, now: float) -> None:
        """End with finish reason ABORT and whatever text is still held back."""
        if not self.is_finished:
            delta = SequenceDelta(self._request_id, [], self.num_cached_tokens)
            self._put(self._output(delta, self._flush()[0], 0, FinishReason.ABORT, None), now)

    def fail(self, error: AserveError, now: float, reason: FinishReason = FinishReason.ERROR) -> None:
        """End with ``error`` in place of a last output; ``reason`` is what the metrics count."""
        if not self.is_finished:
            self._finish(reason, now)
            self.sink.fail(error)

    def break_off(self, error: AserveError, now: float, reason: FinishReason = FinishReason.ERROR) -> None:
        """Fail whatever state the sink is in; one that raises is left alone, so that others can be told."""
        try:
            if self.is_finished:  # the sink raised at its last output, which is counted already
                self.sink.fail(error)
            else:
                self.fail(error, now, reason)
        except Exception:
            logger.exception("request %s: its sink cannot be told that it failed", self._request_id)

    def _deliver_rare(self, delta: SequenceDelta, now: float) -> bool:
        """Deliver the first delta, the last, one without a token or with several."""
        if delta.error is not None:
            self.fail(AserveError(delta.error), now)
            return False
        if not self.num_output_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
            self._metrics.num_cached_tokens += delta.num_cached_tokens
        finish_reason = delta.finish_reason
        pieces, stop = self._decode(delta)
        count = min(len(pieces), len(delta.token_ids))
        stop_reason: str | int | None = stop
        if stop is not None:
            finish_reason = FinishReason.STOP
        elif delta.stop_token_id in self.request.params.stop_token_ids:
            stop_reason = delta.stop_token_id
        self._count_tokens(count, now)
        output = self._output(delta, "".join(pieces), count, finish_reason, stop_reason)
        if count > 1:
            output.token_ends = list(accumulate(map(len, pieces)))
        self._put(output, now)
        return finish_reason is not None and delta.finish_reason is None

    def _decode(self, delta: SequenceDelta) -> tuple[list[str], str | None]:
        """Return the text to show of each token up to a stop string, at least one; and the stop string if it matched.

        Tokens go in one by one, so that they can be counted. The first ``min_tokens`` cannot be part of a stop string.
        The token that ended the request is left out of the text, unless it was asked for.
        """
        num_tokens = len(delta.token_ids)
        hides_last = delta.stop_token_id is not None and not self._ending_is_shown
        pieces: list[str] = []
        for count, token_id in enumerate(delta.token_ids[: num_tokens - hides_last], start=1):
            shown, stop = self._detokenizer.push([token_id]), None
            if self._stops is not None and self.num_output_tokens + count > self._min_tokens:
                shown, stop = self._stops.push(shown)
            pieces.append(shown)
            if stop is not None:
                pieces[-1] = self._closed(shown, stop)
                return pieces, stop
        if len(pieces) < max(num_tokens, 1):
            pieces.append("")
        if delta.finish_reason is None:
            return pieces, None
        shown, stop = self._flush()
        pieces[-1] += shown if stop is None else self._closed(shown, stop)
        return pieces, stop

    def _flush(self) -> tuple[str, str | None]:
        """Return the text still held back, and the stop string that it completes if it does."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text, None
        shown, stop = self._stops.push(text)
        return (shown, stop) if stop is not None else (shown + self._stops.flush(), None)

    def _closed(self, text: str, stop: str) -> str:
        return text + stop if self._ending_is_shown else text

    def _count_tokens(self, count: int, now: float) -> None:
        """Keep totals and times; the tokens of one step share its time."""
        if count == 0:
            return
        self._metrics.num_generation_tokens += count
        if self.num_output_tokens == 0:
            self._metrics.time_to_first_token.observe(now - self.request.arrival_time_s)
        else:
            self._observe_gap(now - self._last_token_s)
        self.num_output_tokens += count
        self._last_token_s = now

    def _output(
        self,
        delta: SequenceDelta,
        text: str,
        count: int,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> RequestOutput:
        """Build the output of the first ``count`` tokens of ``delta``."""
        return RequestOutput(
            self._request_id,
            text,
            delta.token_ids[:count],
            self._num_prompt_tokens,
            self.num_output_tokens,
            self.num_cached_tokens,
            finish_reason,
            stop_reason,
            delta.logprobs and delta.logprobs[:count],
            delta.prompt_logprobs,
        )

    def _put(self, output: RequestOutput, now: float) -> None:
        if output.finish_reason is not None:
            self._finish(output.finish_reason, now)
        self.sink.put(output)

    def _finish(self, reason: FinishReason, now: float) -> None:
        self.is_finished = True
        elapsed_s = now - self.request.arrival_time_s
        self._metrics.record_finish(reason, self._num_prompt_tokens, self.num_output_tokens, elapsed_s)
