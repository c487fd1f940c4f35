"""A device that keeps real tables and slots and a model whose next token depends on all tokens before.

Each slot holds a digest of the whole token history up to its position. A step recomputes the digests from the token
pool and compares what it reads, so an unwritten, freed or foreign page is noticed at the first read. A step is executed
only when ``complete`` is called, as late as a real device might.
"""

import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aserve.request import FinishReason, Request, SamplingParams, TokenLogprobs
from aserve.scheduler.delta import SequenceDelta
from aserve.scheduler.drafter import Draft, Drafter
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import RowStart, StepPlan, StepTokens
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduler.sequence import Sequence

MASK = 2**61 - 1
POISON = -1
ERROR_EVERY = 40  # of this many samples of a request with ``min_p`` set, one fails


def make_limits(**changes: float) -> Limits:
    """Return roomy limits of a small model, with ``changes``."""
    sizes = {"max_model_len": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_pages": 200, "page_size": 4}
    return Limits(**{"vocab_size": 50, **sizes, **changes})


def make_request(
    request_id: str, prompt: Iterable[int], *, priority: int = 0, seed: int | None = 5, **params: object
) -> Request:
    """Return a request that goes on to its ``max_tokens`` unless ``params`` say otherwise."""
    sampling = SamplingParams(**{"ignore_eos": True, "max_tokens": 8, "seed": seed, **params})
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=sampling, priority=priority)


def digest(history: int, token_id: int) -> int:
    """Return the digest of a history extended by one token."""
    return ((history ^ (token_id + 0x9E3779B97F4A7C15)) * 0x100000001B3 + 0x7F4A7C15) & MASK


def pick_token(history: int, seed: int, position: int, vocab_size: int) -> int:
    """Return the token after ``history``: like a seeded sample, it depends on (seed, position) alone besides."""
    return (digest(digest(history, seed), position) >> 13) % vocab_size


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


def run_alone(request: Request, limits: Limits, eos_token_ids: frozenset[int]) -> Reference:
    """Compute the outcome of ``request``, whose seed must be set, token by token: no batches, pages or caches."""
    params, history = request.params, 0
    assert params.seed is not None
    seed = params.seed + 2**64 if params.seed < 0 else params.seed
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
        self.histories: list[list[int]] = [[] for _ in range(limits.max_num_seqs)]
        self.starts: list[RowStart | None] = [None] * limits.max_num_seqs
        self.pending: deque[StepPlan] = deque()
        self.accepted: Counter[int] = Counter()  # how often so many drafts of a row were right

    def poison(self, pages: Iterable[int]) -> None:
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
        verifying = slice(plan.num_decodes, plan.num_decodes + len(plan.drafts))
        assert plan.num_scheduled[verifying] == [1 + len(drafts) for drafts in plan.drafts]
        assert all(plan.is_sampled[verifying])
        assert all(plan.drafts), "a row without drafts among those that verify some"
        assert num_rows <= self.limits.max_num_seqs
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert self.limits.max_num_drafts is None or sum(map(len, plan.drafts)) <= self.limits.max_num_drafts
        assert self.limits.max_num_chunks is None or num_rows - plan.num_decodes <= self.limits.max_num_chunks
        cells = [(row, index) for row, index, _ in plan.page_updates]
        assert len(set(cells)) == len(cells), "a cell of the page table is written twice"
        assert all(0 <= page < self.limits.num_pages for _, _, page in plan.page_updates), "the dummy page"
        self.pending.append(plan)

    def complete(self) -> StepTokens:
        """Execute the oldest launched plan."""
        plan = self.pending.popleft()
        for start in plan.row_starts:
            self.starts[start.row] = start
            self.histories[start.row] = []
            self.token_pool[start.row] = start.token_ids + [-1] * (self.limits.max_model_len + 1 - len(start.token_ids))
        for row, index, page in plan.page_updates:
            self.page_table[row][index] = page
        for row, computed, drafts in zip(
            plan.rows[plan.num_decodes :], plan.num_computed[plan.num_decodes :], plan.drafts, strict=False
        ):
            self._write(row, computed + 1, drafts)
        tokens = StepTokens(plan.step_id, [], logprobs=[], prompt_logprobs={})
        rows = list(zip(plan.rows, plan.num_computed, plan.num_scheduled, plan.is_sampled, strict=True))
        for place, (row, computed, scheduled, _) in enumerate(rows):
            self._compute(tokens, place, row, computed, computed + scheduled)
        # All rows are read after all have written, so a page with two owners in one step shows.
        for row, computed, scheduled, _ in rows:
            self._verify(row, computed + scheduled)
        drafts_of = dict(enumerate(plan.drafts, plan.num_decodes))
        for place, (row, computed, scheduled, is_sampled) in enumerate(rows):
            if is_sampled:
                self._sample(tokens, row, computed + scheduled, drafts_of.get(place, []))
        return tokens

    def _write(self, row: int, first: int, token_ids: list[int]) -> None:
        """Put tokens into the pool; what was computed of the tokens there before is void."""
        self.token_pool[row][first : first + len(token_ids)] = token_ids
        del self.histories[row][first:]

    def _histories_of(self, row: int, length: int) -> list[int]:
        """Return what the slots of the first ``length`` tokens of ``row`` must hold, from the token pool alone."""
        histories, pool = self.histories[row], self.token_pool[row]
        for position in range(len(histories), length):
            assert pool[position] >= 0, f"row {row} reads a token that was never written"
            histories.append(digest(histories[-1] if histories else 0, pool[position]))
        return histories

    def _verify(self, row: int, length: int) -> None:
        size = self.limits.page_size
        histories = self._histories_of(row, length)
        for start in range(0, length, size):
            slot = self.page_table[row][start // size] * size
            end = min(start + size, length)
            assert self.slots[slot : slot + end - start] == histories[start:end], f"row {row} reads a wrong page"

    def _compute(self, tokens: StepTokens, place: int, row: int, computed: int, end: int) -> None:
        start, pool, size = self.starts[row], self.token_pool[row], self.limits.page_size
        scores = []
        histories = self._histories_of(row, end)
        for position in range(computed, end):
            self.slots[self.page_table[row][position // size] * size + position % size] = histories[position]
            if position + 1 < start.prompt_len:
                scores.append(score(histories[position], pool[position + 1]))
        if start.params.prompt_logprobs is not None and computed < start.prompt_len:
            tokens.prompt_logprobs[place] = scores

    def _sample(self, tokens: StepTokens, row: int, end: int, drafts: list[int]) -> None:
        """Sample after each draft and after the token before them; write what counts.

        What stands after a wrong draft is void, where a real device leaves something.
        """
        start, sampled = self.starts[row], []
        for position in range(end - len(drafts), end + 1):
            history = self.histories[row][position - 1]
            token_id = pick_token(history, start.seed, position, self.limits.vocab_size)
            if fails(history, start.params):
                tokens.errors[len(tokens.token_ids)] = "sampling failed"
                token_id = -1
            sampled.append(max(token_id, 0))
            tokens.token_ids.append(token_id)
            tokens.logprobs.append(score(history, token_id) if start.params.logprobs is not None else None)
        num_valid = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), len(drafts)) + 1
        self.accepted[num_valid - 1] += bool(drafts)
        self._write(row, end - len(drafts), sampled[:num_valid] + [-1] * (len(sampled) - num_valid))


class GuessingDrafter(Drafter):
    """Knows how each request goes on, guesses right and wrong at random, and expects of that what it likes."""

    def __init__(self, rng: random.Random, limits: Limits, eos_token_ids: frozenset[int], rate: float = 0.5) -> None:
        self.rng, self.limits, self.eos_token_ids, self.rate = rng, limits, eos_token_ids, rate
        self.known: dict[str, list[int]] = {}

    def propose(self, batch: list[Sequence]) -> list[Draft | None]:
        return [self._guess(seq) if self.rng.random() < self.rate else None for seq in batch]

    def _guess(self, seq: Sequence) -> Draft:
        if seq.request_id not in self.known:
            reference = run_alone(seq.request, self.limits, self.eos_token_ids)
            self.known[seq.request_id] = [*seq.request.prompt_token_ids, *reference.token_ids]
        first, count = seq.num_computed + 1, self.rng.randint(1, 6)
        drafts = self.known[seq.request_id][first : first + count]
        drafts += [self.rng.randrange(self.limits.vocab_size) for _ in range(count - len(drafts))]
        if self.rng.random() < 0.5:
            drafts[self.rng.randrange(count)] = self.rng.randrange(self.limits.vocab_size)
        return Draft(drafts, self.rng.choice((0.5, 1.5, 3.0, math.inf)))


@dataclass
class Outcome:
    """What a client has received for one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    is_aborted: bool = False
    num_deltas: int = 0

    def take(self, delta: SequenceDelta) -> None:
        """Append ``delta``; nothing may follow an abort or an end, and nothing may come twice."""
        assert not self.is_aborted, "a delta after an abort"
        assert self.finish_reason is None, "a delta after the end"
        wants_scores = self.request.params.prompt_logprobs is not None
        assert (delta.prompt_logprobs is not None) == (wants_scores and not self.num_deltas)
        assert self.num_cached_tokens in (None, delta.num_cached_tokens), "num_cached_tokens changed"
        self.num_deltas += 1
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.num_cached_tokens = delta.num_cached_tokens
        self.finish_reason, self.stop_token_id, self.error = delta.finish_reason, delta.stop_token_id, delta.error

    def check(self, reference: Reference) -> None:
        """Raise AssertionError unless this is ``reference``, or its beginning while there is no end."""
        assert self.token_ids == reference.token_ids[: len(self.token_ids)]
        if self.finish_reason is None:
            return
        assert self.token_ids == reference.token_ids
        assert self.finish_reason == reference.finish_reason
        assert self.stop_token_id == reference.stop_token_id
        assert (self.error is not None) == reference.error
        assert self.prompt_logprobs == reference.prompt_logprobs
        assert self.logprobs == ([] if self.request.params.logprobs is None else reference.logprobs)


class StepLoop:
    """The step loop without an event loop: ``depth`` plans are in flight while the next is made."""

    def __init__(
        self, limits: Limits, *, depth: int = 1, eos_token_ids: frozenset[int] = frozenset(), **options: object
    ) -> None:
        self.limits, self.depth, self.eos_token_ids = limits, depth, eos_token_ids
        self.scheduler = Scheduler(limits, eos_token_ids=eos_token_ids, **options)
        self.device = DeviceDouble(limits)
        self.outcomes: dict[str, Outcome] = {}
        self.plans: list[StepPlan] = []
        self.free_pages = self.scheduler._memory.cache.allocator
        take_back = self.free_pages.free

        def free_and_poison(pages: Iterable[int]) -> None:
            pages = list(pages)
            take_back(pages)
            self.device.poison(pages)

        self.free_pages.free = free_and_poison

    def add(self, request: Request) -> Outcome:
        """Queue ``request`` and return where its tokens will be seen."""
        self.scheduler.add(request)
        outcome = self.outcomes[request.request_id] = Outcome(request)
        return outcome

    def abort(self, request_id: str) -> bool:
        """Abort a request, if it is not at its end."""
        outcome = self.outcomes[request_id]
        was_open = outcome.finish_reason is None and not outcome.is_aborted
        assert self.scheduler.abort(request_id) is was_open
        assert self.scheduler.abort(request_id) is False
        outcome.is_aborted = outcome.is_aborted or was_open
        self.scheduler.check_integrity()
        return was_open

    def launch(self) -> StepPlan | None:
        """Plan and launch one step."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self.device.launch(plan)
            self.plans.append(plan)
        return plan

    def commit(self) -> None:
        """Let the device complete its oldest step."""
        for delta in self.scheduler.commit(self.device.complete()):
            self.outcomes[delta.request_id].take(delta)
        self.scheduler.check_integrity()

    def turn(self) -> StepPlan | None:
        """Launch a step if there is one; commit the oldest if nothing else can go on."""
        plan = self.launch()
        if self.device.pending and (plan is None or len(self.device.pending) > self.depth):
            self.commit()
        return plan

    @property
    def is_busy(self) -> bool:
        """True until every request has ended and every step is committed."""
        return self.scheduler.has_unfinished or bool(self.device.pending)

    def run(self, max_turns: int = 10_000) -> None:
        """Turn until all is done; then nothing may be held."""
        for _ in range(max_turns):
            if not self.is_busy:
                break
            self.turn()
        assert not self.is_busy, "no end in sight"
        self.check_idle()

    def check_idle(self) -> None:
        """Raise AssertionError if an ended request left anything behind."""
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.num_held_pages == stats.num_waiting == stats.num_running == stats.num_in_flight == 0
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages

    def check_outcomes(self) -> None:
        """Compare every request that was not aborted with its run alone."""
        for outcome in self.outcomes.values():
            reference = run_alone(outcome.request, self.limits, self.eos_token_ids)
            outcome.check(reference)
            assert outcome.is_aborted or outcome.finish_reason is not None, "a request never ended"


def run_every_interleaving(make_loop: Callable[[], StepLoop]) -> None:
    """Try all orders of planning, committing and at most one abort of request "a" over eight actions."""
    for actions in itertools.product("lca", repeat=8):
        if actions.count("a") > 1:
            continue
        loop = make_loop()
        for action in actions:
            if action == "l":
                loop.launch()
            elif action == "c" and loop.device.pending:
                loop.commit()
            elif action == "a" and loop.outcomes["a"].finish_reason is None:
                loop.abort("a")
        loop.run()
        loop.check_outcomes()
