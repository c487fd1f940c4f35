"""A device double without a device: it runs a script instead of a model.

It keeps the token pool and the page table that a real runner keeps, so tests can check what a step would read,
and it is cheap enough to measure the loop with. It does no attention and holds no KV.
"""

import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from aserve.request import SamplingParams, TokenLogprobs
from aserve.runner.base import ModelRunner
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import RowStart, StepPlan, StepTokens

Script = Callable[[Sequence[int], int], int | Sequence[float]]
"""``(tokens of the row, position of the next one) -> its id, or the logits it is sampled from``."""


class RowFailure(Exception):
    """Raised by a script to fail one row; anything else that it raises fails the whole step."""


@dataclass(slots=True)
class _Launch:
    """One step on its way; ``number`` counts launches from 0."""

    number: int
    plan: StepPlan
    future: "Future[StepTokens]"


class ScriptedRunner(ModelRunner):
    """Completes steps when told (``step_time_s`` None), or by a thread that takes ``step_time_s`` for each."""

    def __init__(self, limits: Limits, script: Script, *, step_time_s: float | None = 0.0) -> None:
        self._limits = limits
        self._script = script
        self._step_time_s = step_time_s
        self.token_pool: list[list[int]] = [[] for _ in range(limits.max_num_seqs)]
        self.page_table: list[list[int]] = [[] for _ in range(limits.max_num_seqs)]
        self.launched: deque[_Launch] = deque()  # not yet completed, oldest first
        self.num_launched = 0
        self.is_closed = False
        self._starts: list[RowStart | None] = [None] * limits.max_num_seqs
        self._failures: dict[int, Exception] = {}
        self._stalled_from = math.inf
        self._queue: queue.SimpleQueue[_Launch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def limits(self) -> Limits:
        """Sizes that the scheduler plans with."""
        return self._limits

    def fail_step(self, number: int, error: Exception) -> None:
        """Let the step that is launched as ``number`` (from 0) fail as a whole."""
        self._failures[number] = error

    def stall_from(self, number: int) -> None:
        """Never complete the step that is launched as ``number`` (from 0), nor a later one."""
        self._stalled_from = number

    def launch(self, plan: StepPlan) -> "Future[StepTokens]":
        """Accept ``plan``; it runs when it is completed."""
        launch = _Launch(self.num_launched, plan, Future())
        self.num_launched += 1
        self.launched.append(launch)
        if self._step_time_s is not None:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="scripted-device", daemon=True)
                self._thread.start()
            self._queue.put(launch)
        return launch.future

    def complete_next(self) -> StepTokens | None:
        """Run the oldest launched step and complete its future; returns its tokens, None if it failed."""
        launch = self.launched.popleft()
        try:
            if error := self._failures.get(launch.number):
                raise error
            tokens = self.execute(launch.plan)
        except Exception as error:
            launch.future.set_exception(error)
            return None
        launch.future.set_result(tokens)
        return tokens

    def execute(self, plan: StepPlan) -> StepTokens:
        """Do to the tables what the device would do in this step, and sample."""
        for start in plan.row_starts:
            self._starts[start.row] = start
            self.token_pool[start.row] = list(start.token_ids)
            self.page_table[start.row] = []
        for row, place, page in plan.page_updates:
            pages = self.page_table[row]
            pages.extend([-1] * (place + 1 - len(pages)))
            pages[place] = page
        drafts_of = dict(enumerate(plan.drafts, plan.num_decodes))
        tokens = StepTokens(plan.step_id, [], step_time_s=self._step_time_s or 0.0)
        for place, row in enumerate(plan.rows):
            drafts = drafts_of.get(place, [])
            end = plan.num_computed[place] + plan.num_scheduled[place] - len(drafts)  # what follows is sampled first
            history = self.token_pool[row]
            if end > len(history):
                raise RuntimeError(f"row {row} computes token {end - 1}, but only {len(history)} are known")
            started = self._starts[row]
            assert started is not None, f"row {row} was never started"
            if started.params.prompt_logprobs is not None:
                known = history[plan.num_computed[place] + 1 : min(end + 1, started.prompt_len)]
                self._report_prompt(tokens, place, known, started)
            if plan.is_sampled[place]:
                if end < len(history):
                    raise RuntimeError(f"row {row} samples token {end}, but knows {len(history)} already")
                self._verify(tokens, started, drafts)
        return tokens

    def warm_up(self) -> None:
        """Do nothing: there is nothing to compile."""

    def close(self) -> None:
        """End the thread; steps that a stall holds back are cancelled."""
        self.is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        while self.launched:
            self.launched.popleft().future.cancel()

    def _serve(self) -> None:
        """Complete launches one after the other, each ``step_time_s`` after the device became free."""
        free_at = time.perf_counter()
        while (launch := self._queue.get()) is not None:
            if launch.number >= self._stalled_from:
                continue
            free_at = max(free_at, time.perf_counter()) + (self._step_time_s or 0.0)
            if (delay := free_at - time.perf_counter()) > 0:
                time.sleep(delay)
            self.complete_next()

    def _verify(self, tokens: StepTokens, start: RowStart, drafts: list[int]) -> None:
        """Sample after what the row knows and after each of its drafts; it then knows what counts."""
        history = self.token_pool[start.row]
        end = len(history)
        sampled = [self._sample(tokens, start)]
        for draft in drafts:
            history.append(draft)
            sampled.append(self._sample(tokens, start))
        num_accepted = next((place for place, draft in enumerate(drafts) if draft != sampled[place]), len(drafts))
        history[end:] = sampled[: num_accepted + 1]

    def _sample(self, tokens: StepTokens, start: RowStart) -> int:
        """Append what follows the row's history to ``tokens``, and return it."""
        history = self.token_pool[start.row]
        position = len(history)
        wants_logprobs = start.params.logprobs is not None
        logprobs: TokenLogprobs | None = None
        try:
            answer = self._script(history, position)
            if isinstance(answer, int):
                token_id = answer
                if wants_logprobs:
                    logprobs = _one_hot(answer, start.params.logprobs or 0, self._limits.vocab_size)
            else:
                token_id = sample(answer, start.params, start.seed, position)
                if wants_logprobs:
                    logprobs = report(answer, token_id, start.params.logprobs or 0)
        except RowFailure as failure:
            tokens.errors[len(tokens.token_ids)] = str(failure)
            token_id = -1
        if logprobs is not None and tokens.logprobs is None:
            tokens.logprobs = [None] * len(tokens.token_ids)
        tokens.token_ids.append(token_id)
        if tokens.logprobs is not None:
            tokens.logprobs.append(logprobs)
        return token_id

    def _report_prompt(self, tokens: StepTokens, place: int, followers: Sequence[int], start: RowStart) -> None:
        """Report the prompt tokens ``followers``, each predicted by the scheduled token before it."""
        count = start.params.prompt_logprobs or 0
        if tokens.prompt_logprobs is None:
            tokens.prompt_logprobs = {}
        tokens.prompt_logprobs[place] = [_one_hot(token, count, self._limits.vocab_size) for token in followers]


def sample(logits: Sequence[float], params: SamplingParams, seed: int, position: int) -> int:
    """Draw a token id; depends on the logits, the temperature, the seed and the position alone."""
    if params.temperature == 0:
        return max(range(len(logits)), key=logits.__getitem__)
    top = max(logits)
    weights = [math.exp((logit - top) / params.temperature) for logit in logits]
    return random.Random(f"{seed}/{position}").choices(range(len(logits)), weights)[0]


def report(logits: Sequence[float], token_id: int, count: int) -> TokenLogprobs:
    """Build the log probabilities of ``token_id`` and of the ``count`` most likely ids."""
    top = max(logits)
    normaliser = top + math.log(sum(math.exp(logit - top) for logit in logits))
    best = sorted(range(len(logits)), key=lambda token: -logits[token])[:count]
    return TokenLogprobs(
        token_id, logits[token_id] - normaliser, tuple((token, logits[token] - normaliser) for token in best)
    )


def _one_hot(token_id: int, count: int, vocab_size: int) -> TokenLogprobs:
    """Report a token that has all of the probability; the others have a log probability of minus infinity."""
    others = (token for token in range(min(vocab_size, count + 1)) if token != token_id)
    top = [(token_id, 0.0), *((token, -math.inf) for token in others)]
    return TokenLogprobs(token_id, 0.0, tuple(top[:count]))
