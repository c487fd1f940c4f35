"""What this CPU can do, measured on the loaded model at start: how large a step may be, and what context costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from aserve.runner.warm_up import dummy_plan
from aserve.scheduler.plan import StepPlan, StepTokens

MAX_STEP_S = 0.25
TARGET_S = 0.16  # what is aimed at: a third is left for a busier machine and for contexts longer than those measured
MAX_CPU_TOKENS = 4096  # largest step tried
MIN_TOKENS = 64  # smallest budget, however slow the machine is or seems to be
GRAIN = 16  # a measured budget is a multiple of this
MAX_GROWTH = 4  # from one step tried to the next, so that a wrong guess does not take seconds
MAX_TRIALS = 4
PATIENCE_S = 1.5  # after that no larger step is tried
MAX_REPEATS = 3  # timings of one step,
REPEAT_S = 0.2  # but two if they took that long together
MAX_CONTEXT = 6144  # earlier tokens used to measure their cost; it is higher where they no longer fit into a cache
CONTEXT_CHUNK = 32

Execute = Callable[[StepPlan], StepTokens]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Tokens in a step of ``MAX_STEP_S``, and the cost of an earlier token in units of a token's linear layers."""

    max_num_batched_tokens: int
    context_cost: float


class StepTimer:
    """Times steps of the dummy row; ``max_model_len`` bounds the positions that exist."""

    def __init__(self, execute: Execute, max_num_seqs: int, max_model_len: int) -> None:
        self._execute = execute
        self._dummy_row = max_num_seqs
        self._started_at_s = time.perf_counter()
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len

    @property
    def is_late(self) -> bool:
        """Whether the timings so far have used up what a start may spend on them."""
        return time.perf_counter() - self._started_at_s > PATIENCE_S

    @property
    def min_num_tokens(self) -> int:
        """Smallest budget: every sequence can decode in one step."""
        return min(max(self.max_num_seqs, MIN_TOKENS), self.max_num_tokens)

    @property
    def max_num_tokens(self) -> int:
        """Largest step that ``full_step_s`` can lay out; a token for each sequence at least."""
        num_decodes = self.max_num_seqs // 2
        most = num_decodes + (self.max_num_seqs - num_decodes) * (self.max_model_len - 1)
        return min(max(MAX_CPU_TOKENS, self.max_num_seqs), most)

    def time_s(self, spans: list[tuple[int, int]]) -> float:
        """Return the best timing of a step over ``spans`` of (computed, scheduled) tokens; short steps have more.

        The calling thread's own CPU time: it computes or spins from start to end of a step, and what
        other processes take at the moment does not count.
        """
        started_at_s = time.perf_counter()
        best_s = self._time_once_s(spans)
        for i in range(MAX_REPEATS - 1):
            if self.is_late or (i > 0 and time.perf_counter() - started_at_s > REPEAT_S):
                break
            best_s = min(best_s, self._time_once_s(spans))
        return best_s

    def _time_once_s(self, spans: list[tuple[int, int]]) -> float:
        plan = dummy_plan(self._dummy_row, spans)
        started_at_s = time.thread_time()
        self._execute(plan)
        return time.thread_time() - started_at_s

    def full_step_s(self, num_tokens: int) -> float:
        """Time a step as a busy server has it: decodes beside prompt chunks, all of them sampled."""
        num_decodes = min(self.max_num_seqs, num_tokens) // 2
        spans = [(0, 1)] * num_decodes
        left = num_tokens - num_decodes
        while left > 0:
            spans.append((0, min(left, self.max_model_len - 1)))
            left -= spans[-1][1]
        return self.time_s(spans)


def measure_step_cost(timer: StepTimer) -> StepCost:
    """Find the largest step under ``MAX_STEP_S`` and what attention to earlier tokens adds."""
    num_tokens, token_s = _find_budget(timer)
    return StepCost(num_tokens, _measure_context_cost(timer, token_s))


def _find_budget(timer: StepTimer) -> tuple[int, float]:
    """Return the number of tokens that take ``TARGET_S`` and the seconds of each.

    The time of a step is close to a straight line, so each trial is where the line through the last two meets the
    target; the first line goes through the origin. Between two trials nothing is timed again.
    """
    tokens, step_s = timer.min_num_tokens, timer.full_step_s(timer.min_num_tokens)
    slope_s = step_s / tokens
    for _ in range(MAX_TRIALS - 1):
        fitting = _fit(timer, tokens, step_s, slope_s)
        if timer.is_late or fitting <= tokens * 1.1:
            break
        more = min(fitting, tokens * MAX_GROWTH)
        more_s = timer.full_step_s(more)
        # A line flatter than that is noise rather than a large fixed part.
        slope_s = max((more_s - step_s) / (more - tokens), more_s / more / 8)
        tokens, step_s = more, more_s
    budget = min(_fit(timer, tokens, step_s, slope_s), tokens)  # what was not tried is not promised
    return budget, step_s / tokens


def _fit(timer: StepTimer, tokens: int, step_s: float, slope_s: float) -> int:
    """Return where the line through (``tokens``, ``step_s``) reaches the target, within the timer's bounds."""
    fitting = int(tokens + (TARGET_S - step_s) / slope_s) // GRAIN * GRAIN
    return max(timer.min_num_tokens, min(fitting, timer.max_num_tokens))


def _measure_context_cost(timer: StepTimer, token_s: float) -> float:
    """Return the dearer of a chunk's and a decode's cost per earlier token, in units of ``token_s``."""
    context = min(MAX_CONTEXT, timer.max_model_len - CONTEXT_CHUNK - 1)
    if context < CONTEXT_CHUNK:
        return 0.0  # so short that it does not matter
    num_decodes = min(timer.max_num_seqs, 8)
    chunk_s = timer.time_s([(context, CONTEXT_CHUNK)]) - timer.time_s([(0, CONTEXT_CHUNK)])
    decode_s = timer.time_s([(context, 1)] * num_decodes) - timer.time_s([(0, 1)] * num_decodes)
    return max(0.0, chunk_s / CONTEXT_CHUNK, decode_s / num_decodes) / (context * token_s)
