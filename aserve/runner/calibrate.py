"""What this CPU can do, measured on the loaded model at start: how large a step may be, and what context costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from aserve.runner.warm_up import dummy_plan
from aserve.scheduler.plan import StepPlan, StepTokens

MAX_STEP_S = 0.25
HEADROOM = 0.8  # of that, for a machine that is busier later than now
MAX_CPU_TOKENS = 4096  # largest step tried
GRAIN = 16  # the budget is a multiple of this
MAX_CONTEXT = 2048  # earlier tokens used to measure their cost

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
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len

    def time_s(self, spans: list[tuple[int, int]]) -> float:
        """Return the better of two timings of a step over ``spans`` of (computed, scheduled) tokens.

        The calling thread's own CPU time: it computes or spins from start to end of a step, and what
        other processes take at the moment does not count.
        """
        return min(self._time_once_s(spans) for _ in range(2))

    def _time_once_s(self, spans: list[tuple[int, int]]) -> float:
        plan = dummy_plan(self._dummy_row, spans)
        started_at_s = time.thread_time()
        self._execute(plan)
        return time.thread_time() - started_at_s

    @property
    def max_num_tokens(self) -> int:
        """Largest step that ``full_step_s`` can lay out."""
        return min(MAX_CPU_TOKENS, self.max_num_seqs * (self.max_model_len - 1) // 2)

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
    num_tokens, step_s = _find_budget(timer)
    token_s = step_s / num_tokens
    return StepCost(num_tokens, _measure_context_cost(timer, token_s, min(num_tokens, 64)))


def _find_budget(timer: StepTimer) -> tuple[int, float]:
    """Return the number of tokens and the seconds they took: double, then interpolate once the target is near."""
    target_s = MAX_STEP_S * HEADROOM
    num_tokens = min(2 * GRAIN, timer.max_num_tokens)
    step_s = timer.full_step_s(num_tokens)
    while step_s < target_s / 2 and num_tokens < timer.max_num_tokens:
        num_tokens = min(2 * num_tokens, timer.max_num_tokens)
        step_s = timer.full_step_s(num_tokens)
    for _ in range(2):
        fitting = min(int(num_tokens * target_s / step_s) // GRAIN * GRAIN, timer.max_num_tokens)
        if step_s <= target_s and fitting <= num_tokens * 1.1:
            break
        num_tokens = max(GRAIN, fitting)
        step_s = timer.full_step_s(num_tokens)
    return num_tokens, step_s


def _measure_context_cost(timer: StepTimer, token_s: float, chunk: int) -> float:
    """Return the dearer of a chunk's and a decode's cost per earlier token, in units of ``token_s``."""
    context = min(MAX_CONTEXT, timer.max_model_len - chunk - 1)
    if context < chunk:
        return 0.0  # so short that it does not matter
    num_decodes = min(timer.max_num_seqs, 8)
    chunk_s = timer.time_s([(context, chunk)]) - timer.time_s([(0, chunk)])
    decode_s = timer.time_s([(context, 1)] * num_decodes) - timer.time_s([(0, 1)] * num_decodes)
    return max(0.0, chunk_s / chunk, decode_s / num_decodes) / (context * token_s)
