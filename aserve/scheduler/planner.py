"""Builds plans: which decodes, started prompts and waiting requests share the next step.

Owns the order of the sequences that wait, that are within their prompt and that decode.
"""

from dataclasses import dataclass

from aserve.scheduler.draft_planner import DraftPlanner
from aserve.scheduler.limits import Limits
from aserve.scheduler.memory import SequenceMemory
from aserve.scheduler.plan import RowStart, StepPlan
from aserve.scheduler.sequence import Sequence, Status
from aserve.scheduler.token_budget import PROMPT_SHARE, TokenBudget
from aserve.scheduler.waiting_queue import WaitingQueue

SPARE_STEPS = 16  # decode steps that should find pages after a new sequence has taken its own


@dataclass(slots=True)
class Flight:
    """A plan and the sequences of its rows, in order."""

    plan: StepPlan
    sequences: list[Sequence]


class StepPlanner:
    """Decodes come first, then the next chunks of started prompts, then the head of the queue.

    Neither side starves the other: prompts leave the decodes their place, and decodes that do not all fit
    take turns and leave a share of the step to prompts.
    """

    def __init__(self, limits: Limits, memory: SequenceMemory, drafts: DraftPlanner | None = None) -> None:
        self.num_running = 0
        self.num_preemptions = 0
        self._limits = limits
        self._memory = memory
        self._drafts = drafts
        self._budget = TokenBudget(limits.context_cost)
        self._waiting = WaitingQueue()
        self._prefills: list[Sequence] = []  # by rank
        self._decodes: list[Sequence] = []  # those to be served first in front
        self._prompts_starved = False  # in the step before decodes left no token to any prompt
        self._blocked: tuple[Sequence, int] | None = None  # head of the queue and the surplus it could not start with

    @property
    def num_waiting(self) -> int:
        """Sequences that hold neither row nor pages, preempted ones included."""
        return len(self._waiting)

    def enter(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self._waiting.push(seq)

    def leave(self, seq: Sequence) -> None:
        """Plan nothing more for ``seq``, wherever it stands."""
        if seq.status is Status.WAITING:
            self._waiting.remove(seq)
            return
        if seq.status is Status.PREFILLING:
            self._prefills.remove(seq)
        elif seq.status is Status.DECODING:
            self._decodes.remove(seq)
        self.num_running -= 1

    def resume(self, seq: Sequence) -> None:
        """Plan ``seq`` again, now that its drafts are verified."""
        seq.status = Status.DECODING
        self._decodes.append(seq)

    def plan(self, step_id: int, *, is_idle: bool) -> Flight | None:
        """Return the next step, or None if there is nothing to compute now.

        ``is_idle`` says that no plan is in flight, so that no pages can come back by waiting.
        """
        if not self._secure_decode_pages(is_idle):
            return None
        flight = Flight(StepPlan(step_id), [])
        remaining = float(self._limits.max_num_batched_tokens)
        has_prompts = self._has_prompts()
        if self._decodes and not (has_prompts and self._prompts_starved):
            share = PROMPT_SHARE if has_prompts else 0.0
            remaining -= self._plan_decodes(flight, remaining * (1.0 - share))
        self._prompts_starved = False
        self._plan_prefills(flight, remaining)
        if not flight.sequences and self._decodes:  # it was the prompts' turn, but the head of the queue got no pages
            self._plan_decodes(flight, remaining)
        return flight if flight.sequences else None

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless each of ``running`` stands exactly where its status says."""
        assert len(running) == self.num_running, "the count of running sequences drifted"
        for status, listed in ((Status.PREFILLING, self._prefills), (Status.DECODING, self._decodes)):
            assert {id(seq) for seq in running if seq.status is status} == {id(seq) for seq in listed}, status
            assert len({id(seq) for seq in listed}) == len(listed), "a sequence is listed twice"

    def _secure_decode_pages(self, is_idle: bool) -> bool:
        """Give a page to each decode that has filled its last one; False if no rows may be added now.

        Missing pages may come back when the steps in flight are committed. Once none is, the running sequence of the
        largest rank gives way. The one of the smallest rank never does, so it gets done.
        """
        for seq in [seq for seq in self._decodes if seq.num_computed == seq.next_event]:
            while seq.status is Status.DECODING and not self._memory.extend(seq):
                if not is_idle:
                    return False
                self._preempt(max(self._prefills + self._decodes, key=_rank_of))
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Send ``seq`` back to the queue; its full pages stay findable, the rest is computed again later."""
        assert self.num_running > 1, "a sequence outgrew the pool alone; max_len should have ended it"
        self.leave(seq)
        self._memory.release(seq)
        seq.status = Status.WAITING
        if seq.prompt_logprobs is not None:
            seq.prompt_logprobs = [None]
        self._waiting.push(seq)
        self.num_preemptions += 1

    def _plan_decodes(self, flight: Flight, budget: float) -> float:
        """Add one token of each decode, as many as ``budget`` allows, then drafts, and return their cost."""
        batch = self._decodes.copy()
        contexts = [seq.num_computed for seq in batch]
        num_decodes = self._budget.count_decodes(contexts, budget)
        if num_decodes < len(batch):
            self._decodes = batch[num_decodes:] + batch[:num_decodes]
            del batch[num_decodes:], contexts[num_decodes:]
        cost = self._budget.decodes_cost(contexts, num_decodes)
        chosen = self._drafts.choose(batch, budget - cost, self._num_spare_pages()) if self._drafts is not None else []
        if chosen:
            verifying = {seq for seq, _ in chosen}
            batch = [seq for seq in batch if seq not in verifying]
            contexts = [seq.num_computed for seq in batch]
        plan, num_decodes = flight.plan, len(batch)
        flight.sequences = batch
        plan.num_decodes = num_decodes
        plan.rows = [seq.row for seq in batch]
        plan.num_computed = contexts
        plan.num_scheduled = [1] * num_decodes
        plan.is_sampled = [True] * num_decodes
        self._advance_decodes(batch, plan.step_id)
        return cost + self._plan_drafts(flight, chosen)

    def _advance_decodes(self, batch: list[Sequence], step_id: int) -> None:
        is_any_last = False
        for seq in batch:
            seq.last_step = step_id
            seq.num_computed = num_computed = seq.num_computed + 1
            if num_computed == seq.next_event and num_computed == seq.max_len - 1:
                seq.status = Status.DRAINING
                is_any_last = True
        if is_any_last:
            self._decodes = [seq for seq in self._decodes if seq.status is Status.DECODING]

    def _plan_drafts(self, flight: Flight, chosen: list[tuple[Sequence, list[int]]]) -> float:
        """Add the rows that verify drafts, and return what these cost."""
        cost, plan = 0.0, flight.plan
        for seq, drafts in chosen:
            flight.sequences.append(seq)
            plan.rows.append(seq.row)
            plan.num_computed.append(seq.num_computed)
            plan.num_scheduled.append(1 + len(drafts))
            plan.is_sampled.append(True)
            plan.drafts.append(drafts)
            cost += self._budget.cost(len(drafts), seq.num_computed + 1)
            seq.num_computed += 1 + len(drafts)
            seq.last_step = plan.step_id
            seq.status = Status.VERIFYING
        if chosen:
            self._decodes = [seq for seq in self._decodes if seq.status is Status.DECODING]
        return cost

    def _plan_prefills(self, flight: Flight, remaining: float) -> None:
        """Fill what remains of the budget: started prompts by rank, then the head of the queue while it starts."""
        for seq in self._prefills.copy():
            if not self._has_chunk_left(flight.plan):
                return
            chunk = self._budget.largest_chunk(remaining, seq.num_computed)
            if chunk == 0 and flight.sequences:
                self._prompts_starved = flight.plan.num_chunks == 0
                return
            remaining -= self._plan_chunk(flight, seq, chunk)
        while self._waiting and not self._is_head_blocked() and self._has_chunk_left(flight.plan):
            if remaining < 1.0:
                self._prompts_starved = flight.plan.num_chunks == 0
                return
            seq = self._waiting.first
            if not self._start(seq):
                return
            start = RowStart(seq.row, seq.token_ids.copy(), seq.prompt_len, seq.seed, seq.params, seq.request_id)
            flight.plan.row_starts.append(start)
            chunk = self._budget.largest_chunk(remaining, seq.num_computed)
            remaining -= self._plan_chunk(flight, seq, chunk)

    def _has_chunk_left(self, plan: StepPlan) -> bool:
        """Whether the step may hold one more prefill chunk."""
        most = self._limits.max_num_chunks
        return most is None or len(plan.rows) - plan.num_decodes < most

    def _plan_chunk(self, flight: Flight, seq: Sequence, max_tokens: int) -> float:
        """Add the next chunk of a prompt, at least one token, and return its cost."""
        num_computed = seq.num_computed
        num_tokens = min(max(1, max_tokens), len(seq.token_ids) - num_computed)
        seq.num_computed += num_tokens
        seq.last_step = flight.plan.step_id
        is_last = seq.num_computed == len(seq.token_ids)
        flight.sequences.append(seq)
        flight.plan.rows.append(seq.row)
        flight.plan.num_computed.append(num_computed)
        flight.plan.num_scheduled.append(num_tokens)
        flight.plan.is_sampled.append(is_last)
        if is_last:
            self._prefills.remove(seq)
            if seq.num_computed < seq.max_len - 1:
                seq.status = Status.DECODING
                self._decodes.append(seq)
            else:
                seq.status = Status.DRAINING
        return self._budget.cost(num_tokens, num_computed)

    def _start(self, seq: Sequence) -> bool:
        """Move the head of the queue to the running prompts if it gets its pages."""
        num_spare_pages = self._num_spare_pages()
        use_prefix = seq.prompt_logprobs is None  # else the logits of all its prompt are needed
        if not self._memory.start(seq, use_prefix=use_prefix, num_spare_pages=num_spare_pages):
            self._blocked = seq, self._memory.cache.num_available - num_spare_pages
            return False
        self._blocked = None
        self._waiting.remove(seq)
        if not seq.last_step:
            seq.num_cached_tokens = seq.num_computed
        seq.status = Status.PREFILLING
        self.num_running += 1
        self._prefills.append(seq)
        self._prefills.sort(key=_rank_of)
        return True

    def _has_prompts(self) -> bool:
        return bool(self._prefills) or (bool(self._waiting) and not self._is_head_blocked())

    def _is_head_blocked(self) -> bool:
        """True if the head of the queue lacks a row, or lacks pages as it did when last tried."""
        if not self._memory.num_free_rows:
            return True
        if self._blocked is None or not self.num_running:
            return False
        head, surplus = self._blocked
        return head is self._waiting.first and self._memory.cache.num_available - self._num_spare_pages() <= surplus

    def _num_spare_pages(self) -> int:
        """Return what a start must leave, so that no one is preempted soon after; at most an eighth of the pool."""
        if not self.num_running:
            return 0
        return min(self.num_running * SPARE_STEPS // self._limits.page_size, self._limits.num_pages // 8)


def _rank_of(seq: Sequence) -> tuple[int, int]:
    return seq.rank
