"""A device that keeps real tables and slots and a model whose next token depends on all tokens before.

Each slot holds a digest of the whole token history up to its position. A step recomputes the digests from the token
pool and compares what it reads, so an unwritten, freed or foreign page is noticed at the first read. A step is executed
only when ``complete`` is called, as late as a real device might.
"""

from collections import deque
from dataclasses import dataclass

from aserve.request import Request, SamplingParams, TokenLogprobs
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import StepPlan, StepTokens

MASK = 2**61 - 1
POISON = -1
ERROR_EVERY = 40  # of this many samples of a request with ``min_p`` set, one fails


def digest(history: int, token_id: int) -> int:
    """Return the digest of a history extended by one token."""
    return ((history ^ (token_id + 0x9E3779B97F4A7C15)) * 0x100000001B3 + 0x7F4A7C15) & MASK


def pick_token(history: int, seed: int, position: int, vocab_size: int) -> int:
    """Return the token after ``history``: like a seeded sample, it depends on (seed, position) alone besides."""
    return (digest(digest(history, seed & 0xFFFF), position) >> 13) % vocab_size


def fails(history: int, params: SamplingParams) -> bool:
    """Return whether sampling after ``history`` fails; only requests with ``min_p`` ever do."""
    return params.min_p > 0 and (history >> 7) % ERROR_EVERY == 0


def score(history: int, token_id: int) -> TokenLogprobs:
    """Return what the model reports for ``token_id`` after ``history``."""
    return TokenLogprobs(token_id, -float((history ^ token_id) % 1000))


@dataclass
class Reference:
    """What a request yields when it is alone in an endless pool."""

    token_ids: list[int]
    finish_reason: str
    stop_token_id: int | None
    error: bool
    prompt_logprobs: list[TokenLogprobs | None] | None
    logprobs: list[TokenLogprobs]


def run_alone(request: Request, limits: Limits, eos_token_ids: frozenset[int], seed: int) -> Reference:
    """Compute the outcome of ``request`` token by token, without batches, pages or caches."""
    params, history = request.params, 0
    prompt_logprobs: list[TokenLogprobs | None] = [None]
    for position, token_id in enumerate(request.prompt_token_ids):
        if position:
            prompt_logprobs.append(score(history, token_id))
        history = digest(history, token_id)
    reported = None if params.prompt_logprobs is None else prompt_logprobs
    room = min(limits.max_model_len, limits.num_pages * limits.page_size + 1) - len(request.prompt_token_ids)
    max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
    result = Reference([], "length", None, False, reported, [])
    position = len(request.prompt_token_ids)
    while len(result.token_ids) < max(1, max_tokens):
        if fails(history, params):
            result.finish_reason, result.error = "error", True
            break
        if max_tokens == 0:
            break
        token_id = pick_token(history, seed, position, limits.vocab_size)
        result.token_ids.append(token_id)
        result.logprobs.append(score(history, token_id))
        if token_id in stop_ids and len(result.token_ids) >= params.min_tokens:
            result.finish_reason, result.stop_token_id = "stop", token_id
            break
        history, position = digest(history, token_id), position + 1
    return result


class DeviceDouble:
    """Executes plans in order, each when told, on tables like those of a real runner."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.slots = [POISON] * (limits.num_pages * limits.page_size)
        num_pages = -(-limits.max_model_len // limits.page_size)
        self.page_table = [[-1] * num_pages for _ in range(limits.max_num_seqs)]
        self.token_pool = [[-1] * (limits.max_model_len + 1) for _ in range(limits.max_num_seqs)]
        self.starts: list = [None] * limits.max_num_seqs
        self.pending: deque[StepPlan] = deque()
        self.num_steps = 0

    def poison(self, pages: list[int]) -> None:
        """Spoil what freed pages hold; the allocator's ``free`` is made to call this."""
        size = self.limits.page_size
        for page in pages:
            self.slots[page * size : (page + 1) * size] = [POISON] * size

    def launch(self, plan: StepPlan) -> None:
        """Check the form of ``plan`` and keep it for ``complete``."""
        num_rows = len(plan.rows)
        assert num_rows == len(plan.num_computed) == len(plan.num_scheduled) == len(plan.is_sampled) > 0
        assert len(set(plan.rows)) == num_rows, "a row stands twice in one plan"
        assert min(plan.num_scheduled) >= 1
        assert all(plan.is_sampled[: plan.num_decodes])
        assert all(scheduled == 1 for scheduled in plan.num_scheduled[: plan.num_decodes])
        assert num_rows <= self.limits.max_num_seqs
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        cells = [(row, index) for row, index, _ in plan.page_updates]
        assert len(set(cells)) == len(cells), "a cell of the page table is written twice"
        assert all(0 <= page < self.limits.num_pages for _, _, page in plan.page_updates), "the dummy page"
        self.pending.append(plan)

    def complete(self) -> StepTokens:
        """Execute the oldest launched plan."""
        plan = self.pending.popleft()
        self.num_steps += 1
        for start in plan.row_starts:
            self.starts[start.row] = start
            self.token_pool[start.row] = start.token_ids + [-1] * (self.limits.max_model_len + 1 - len(start.token_ids))
        for row, index, page in plan.page_updates:
            self.page_table[row][index] = page
        tokens = StepTokens(plan.step_id, [], logprobs=[], prompt_logprobs={})
        rows = zip(plan.rows, plan.num_computed, plan.num_scheduled, plan.is_sampled, strict=True)
        # All reads of what earlier steps wrote happen before the writes of rows behind, so a page with two owners shows.
        for place, (row, computed, scheduled, is_sampled) in enumerate(rows):
            self._compute(tokens, place, row, computed, scheduled, is_sampled)
        for row, computed, scheduled in zip(plan.rows, plan.num_computed, plan.num_scheduled, strict=True):
            self._verify(row, computed + scheduled)
        return tokens

    def _slot(self, row: int, position: int) -> int:
        size = self.limits.page_size
        return self.page_table[row][position // size] * size + position % size

    def _verify(self, row: int, length: int) -> int:
        history, pool = 0, self.token_pool[row]
        for position in range(length):
            assert pool[position] >= 0, f"row {row} reads a token that was never written"
            history = digest(history, pool[position])
            assert self.slots[self._slot(row, position)] == history, f"row {row} reads a wrong slot at {position}"
        return history

    def _compute(
        self, tokens: StepTokens, place: int, row: int, computed: int, scheduled: int, is_sampled: bool
    ) -> None:
        start, pool = self.starts[row], self.token_pool[row]
        history = self._verify(row, computed)
        scores = []
        end = computed + scheduled
        for position in range(computed, end):
            assert pool[position] >= 0, f"row {row} computes a token that was never written"
            history = digest(history, pool[position])
            self.slots[self._slot(row, position)] = history
            if position + 1 < start.prompt_len:
                scores.append(score(history, pool[position + 1]))
        if start.params.prompt_logprobs is not None and computed < start.prompt_len:
            tokens.prompt_logprobs[place] = scores
        if not is_sampled:
            return
        sampled = len(tokens.token_ids)
        if fails(history, start.params):
            tokens.errors[sampled] = "sampling failed"
            token_id = -1
            pool[end] = 0
        else:
            pool[end] = token_id = pick_token(history, start.seed, end, self.limits.vocab_size)
        tokens.token_ids.append(token_id)
        tokens.logprobs.append(score(history, token_id) if start.params.logprobs is not None else None)
