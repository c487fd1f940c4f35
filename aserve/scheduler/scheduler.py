"""Decides what each step computes and turns what it sampled into deltas: no device, no clock, no event loop.

The order of a step is decodes, then the next chunks of started prompts, then new ones. Plans may be made while earlier
ones are in flight: the next input of a sequence whose token is not yet known on the host waits on the device.
"""

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aserve.errors import CapacityError, ClientError
from aserve.request import FinishReason, Request
from aserve.scheduler.admission import check_request, longest_len
from aserve.scheduler.delta import SequenceDelta
from aserve.scheduler.limits import Limits
from aserve.scheduler.memory import SequenceMemory
from aserve.scheduler.plan import RowStart, StepPlan, StepTokens
from aserve.scheduler.policy import POLICIES
from aserve.scheduler.sequence import Sequence, Status
from aserve.scheduler.stats import SchedulerStats
from aserve.scheduler.token_budget import PROMPT_SHARE, TokenBudget
from aserve.scheduler.waiting_queue import WaitingQueue

SPARE_STEPS = 16  # decode steps that should find pages after a new sequence has taken its own


@dataclass(slots=True)
class Flight:
    """A launched plan and the sequences of its rows, in order."""

    plan: StepPlan
    sequences: list[Sequence]


class Scheduler:
    """Continuous batching over one paged KV pool.

    ``add`` and ``abort`` may be called between any two other calls. Each plan that ``schedule`` returns must be
    launched, and its tokens given to ``commit`` in the order of the launches.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        eos_token_ids: frozenset[int],
        prefix_cache: bool = True,
        policy: str = "fcfs",
        max_queued_requests: int = 1024,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.limits = limits
        self._eos_token_ids = eos_token_ids
        self._rank = POLICIES.load(policy)
        self._max_queued_requests = max_queued_requests
        self._fresh_seed = fresh_seed
        self._budget = TokenBudget(limits.max_num_batched_tokens, limits.context_cost)
        self._memory = SequenceMemory(limits, prefix_cache=prefix_cache)
        self._sequences: dict[str, Sequence] = {}  # all unfinished
        self._waiting = WaitingQueue()
        self._prefills: list[Sequence] = []  # by rank
        self._decodes: list[Sequence] = []  # the next to be served first
        self._flights: deque[Flight] = deque()
        self._last_step = 0
        self._committed_step = 0
        self._num_arrivals = 0
        self._num_preemptions = 0
        self._num_finished = dict.fromkeys(FinishReason, 0)
        self._prompts_starved = False  # by decodes, in the step before
        self._blocked: tuple[Sequence, int] | None = None  # head of the queue, pages it could not start with

    @property
    def num_waiting(self) -> int:
        """Sequences that hold neither row nor pages, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have started and not finished."""
        return len(self._sequences) - len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans that were handed out and not committed."""
        return len(self._flights)

    @property
    def has_unfinished(self) -> bool:
        """True while any request waits or runs."""
        return bool(self._sequences)

    def stats(self) -> SchedulerStats:
        """Return a snapshot of all counts."""
        cache = self._memory.cache
        return SchedulerStats(
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            num_in_flight=self.num_in_flight,
            num_pages=cache.num_pages,
            num_free_pages=cache.num_free,
            num_cached_pages=cache.num_cached,
            num_held_pages=cache.num_pages - cache.num_available,
            num_preemptions=self._num_preemptions,
            num_prefix_tokens_queried=self._memory.num_tokens_queried,
            num_prefix_tokens_hit=self._memory.num_tokens_hit,
            num_finished=dict(self._num_finished),
        )

    def add(self, request: Request) -> None:
        """Queue ``request``.

        Raises ClientError if it can never run, CapacityError if the queue is full.
        """
        check_request(request, self.limits)
        if request.request_id in self._sequences:
            raise ClientError(f"request id {request.request_id!r} is in use", param="request_id")
        if len(self._waiting) >= self._max_queued_requests:
            raise CapacityError(f"{len(self._waiting)} requests are waiting already")
        seq = self._make_sequence(request)
        self._sequences[request.request_id] = seq
        self._waiting.push(seq)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request at once; no delta follows. False if it has ended already or is not known."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        if seq.status is Status.WAITING:
            self._waiting.remove(seq)
        elif seq.status is Status.PREFILLING:
            self._prefills.remove(seq)
        elif seq.status is Status.DECODING:
            self._decodes.remove(seq)
        self._finish(seq, reason)
        return True

    def schedule(self) -> StepPlan | None:
        """Return the next plan to launch; None if there is nothing to do before a plan in flight is committed."""
        if not self._sequences:
            return None
        self._memory.repoint(self._committed_step)
        if not self._secure_decode_pages():
            return None
        plan = StepPlan(self._last_step + 1)
        flight = Flight(plan, [])
        remaining = float(self._budget.max_tokens)
        has_prompts = self._has_prompts()
        if self._decodes and not (has_prompts and self._prompts_starved):
            share = PROMPT_SHARE if has_prompts else 0.0
            remaining -= self._plan_decodes(flight, remaining * (1.0 - share))
        self._prompts_starved = False
        self._plan_prompts(flight, remaining)
        if not plan.rows and self._decodes:
            self._plan_decodes(flight, remaining)
        if not plan.rows:
            if not self._flights and self._sequences:
                raise RuntimeError("the scheduler has work but can plan none of it")
            return None
        self._last_step = plan.step_id
        plan.page_updates = self._memory.take_page_updates()
        self._flights.append(flight)
        return plan

    def commit(self, tokens: StepTokens) -> list[SequenceDelta]:
        """Take the tokens of the oldest plan in flight; return what is new for each sequence that got some."""
        flight = self._flights.popleft()
        if tokens.step_id != flight.plan.step_id or len(tokens.token_ids) != sum(flight.plan.is_sampled):
            raise ValueError(f"step {flight.plan.step_id} must be committed next, with one token for each sampled row")
        self._committed_step = tokens.step_id
        self._commit_chunks(flight, tokens)
        deltas = self._commit_tokens(flight, tokens)
        self._memory.settle(self._committed_step)
        return deltas

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant about pages, rows, locks or states is broken."""
        running = [seq for seq in self._sequences.values() if seq.status is not Status.WAITING]
        self._memory.check_integrity(running)
        assert len(running) == self.num_running, "a waiting sequence is not in the queue"
        for status, listed in ((Status.PREFILLING, self._prefills), (Status.DECODING, self._decodes)):
            assert {id(seq) for seq in running if seq.status is status} == {id(seq) for seq in listed}, status
            assert len(set(map(id, listed))) == len(listed), "a sequence is listed twice"
        for seq in running:
            assert len(seq.token_ids) + seq.num_pending <= max(seq.max_len, seq.prompt_len + 1), "ran past its end"
            assert seq.status is not Status.DRAINING or self._flights, "a sequence waits for a step that is not there"
        if not self._sequences and not self._flights:
            cache = self._memory.cache
            assert cache.num_available == cache.num_pages, "pages are held though nothing runs"

    def _make_sequence(self, request: Request) -> Sequence:
        params = request.params
        self._num_arrivals += 1
        eos = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        return Sequence(
            request=request,
            seed=(self._fresh_seed() if params.seed is None else params.seed) % 2**64,
            rank=self._rank(request, self._num_arrivals),
            stop_token_ids=eos.union(params.stop_token_ids),
            max_len=longest_len(request, self.limits),
            token_ids=list(request.prompt_token_ids),
            prompt_len=len(request.prompt_token_ids),
            node=self._memory.cache.root,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )

    # Planning

    def _secure_decode_pages(self) -> bool:
        """Give a page to each decode at the end of its last one; False if no rows may be added now.

        Pages that are missing now may come back when the steps in flight are committed. If none is in flight, the
        running sequence of the largest rank gives way. The one of the smallest rank never does, so it gets done.
        """
        for seq in [seq for seq in self._decodes if seq.num_computed == seq.next_event]:
            while seq.status is Status.DECODING and not self._memory.extend(seq):
                if self._flights:
                    return False
                self._preempt(max(self._prefills + self._decodes, key=lambda running: running.rank))
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Send ``seq`` back to the queue; its pages stay findable, the rest is computed again later."""
        assert self.num_running > 1, "a sequence outgrew the pool alone; max_len should have ended it"
        (self._prefills if seq.status is Status.PREFILLING else self._decodes).remove(seq)
        self._memory.release(seq)
        seq.status = Status.WAITING
        if seq.prompt_logprobs is not None:
            seq.prompt_logprobs = [None]
        self._waiting.push(seq)
        self._num_preemptions += 1

    def _has_prompts(self) -> bool:
        return bool(self._prefills) or (bool(self._waiting) and not self._is_head_blocked())

    def _is_head_blocked(self) -> bool:
        """True if the head of the queue needs a row, or pages and no more became available since it was last tried."""
        if not self._memory.num_free_rows:
            return True
        if self._blocked is None or not self.num_running:
            return False
        head, num_pages = self._blocked
        return head is self._waiting.first and self._memory.cache.num_available - self._num_spare_pages() <= num_pages

    def _num_spare_pages(self) -> int:
        """Pages that a start must leave, so that the running sequences are not preempted at once; an eighth at most."""
        if not self.num_running:
            return 0
        return min(self.num_running * SPARE_STEPS // self.limits.page_size, self.limits.num_pages // 8)

    def _plan_decodes(self, flight: Flight, budget: float) -> float:
        """Add one token of each decode, as many as ``budget`` allows, and return their cost."""
        decodes = self._decodes
        contexts = [seq.num_computed for seq in decodes]
        num_decodes = self._budget.count_decodes(contexts, budget)
        if num_decodes < len(decodes):
            decodes, contexts = decodes[:num_decodes], contexts[:num_decodes]
            self._decodes = self._decodes[num_decodes:] + decodes
        plan = flight.plan
        step_id = plan.step_id
        flight.sequences = decodes.copy()
        plan.num_decodes = num_decodes
        plan.num_computed = contexts
        plan.num_scheduled = [1] * num_decodes
        plan.is_sampled = [True] * num_decodes
        plan.rows = [seq.row for seq in decodes]
        is_ending = False
        for seq in decodes:
            seq.last_step = step_id
            seq.num_computed = num_computed = seq.num_computed + 1
            if num_computed == seq.next_event and num_computed == seq.max_len - 1:
                seq.status = Status.DRAINING
                is_ending = True
        if is_ending:
            self._drop_ended_decodes()
        return self._budget.decodes_cost(contexts, num_decodes)

    def _drop_ended_decodes(self) -> None:
        self._decodes = [seq for seq in self._decodes if seq.status is Status.DECODING]

    def _plan_prompts(self, flight: Flight, remaining: float) -> None:
        """Fill what remains of the budget: started prompts by rank, then the head of the queue while it starts."""
        for seq in self._prefills.copy():
            chunk = self._budget.largest_chunk(remaining, seq.num_computed)
            if chunk == 0 and flight.plan.rows:
                self._prompts_starved = True
                return
            remaining -= self._plan_chunk(flight, seq, max(1, chunk))
        while self._waiting and not self._is_head_blocked():
            if remaining < 1.0:
                self._prompts_starved = True
                return
            seq = self._waiting.first
            if not self._start(seq):
                return
            flight.plan.row_starts.append(RowStart(seq.row, seq.token_ids.copy(), seq.prompt_len, seq.seed, seq.params, seq.request_id))
            chunk = self._budget.largest_chunk(remaining, seq.num_computed)
            remaining -= self._plan_chunk(flight, seq, max(1, chunk))

    def _start(self, seq: Sequence) -> bool:
        """Move the head of the queue to the running prompts if it gets its pages."""
        num_spare_pages = self._num_spare_pages()
        use_prefix = seq.prompt_logprobs is None  # else all logits of the prompt are needed
        if not self._memory.start(seq, use_prefix=use_prefix, num_spare_pages=num_spare_pages):
            self._blocked = seq, self._memory.cache.num_available - num_spare_pages
            return False
        self._waiting.remove(seq)
        self._blocked = None
        seq.status = Status.PREFILLING
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed
        self._prefills.append(seq)
        self._prefills.sort(key=lambda running: running.rank)
        return True

    def _plan_chunk(self, flight: Flight, seq: Sequence, max_tokens: int) -> float:
        """Add the next chunk of a prompt and return its cost."""
        num_computed = seq.num_computed
        num_tokens = min(max_tokens, len(seq.token_ids) - num_computed)
        plan = flight.plan
        flight.sequences.append(seq)
        plan.rows.append(seq.row)
        plan.num_computed.append(num_computed)
        plan.num_scheduled.append(num_tokens)
        seq.last_step = plan.step_id
        seq.num_computed = num_computed + num_tokens
        is_last = seq.num_computed == len(seq.token_ids)
        plan.is_sampled.append(is_last)
        if is_last:
            self._prefills.remove(seq)
            seq.status = Status.DRAINING
            if seq.num_computed < seq.max_len - 1:
                seq.status = Status.DECODING
                self._decodes.append(seq)
        return self._budget.cost(num_tokens, num_computed)

    # Committing

    def _commit_chunks(self, flight: Flight, tokens: StepTokens) -> None:
        """Collect prompt logprobs, and publish the prompts that are complete."""
        plan = flight.plan
        sampled_place = plan.num_decodes - 1
        for place in range(plan.num_decodes, len(plan.rows)):
            seq, is_complete = flight.sequences[place], plan.is_sampled[place]
            sampled_place += is_complete
            if seq.status is Status.FINISHED:
                continue
            if seq.prompt_logprobs is not None and tokens.prompt_logprobs is not None:
                seq.prompt_logprobs += tokens.prompt_logprobs.get(place, ())
            if is_complete and sampled_place not in tokens.errors:
                self._memory.publish(seq)

    def _commit_tokens(self, flight: Flight, tokens: StepTokens) -> list[SequenceDelta]:
        """Append each sampled token to its sequence, unless that has ended since the launch."""
        deltas: list[SequenceDelta] = []
        is_any_finished = False
        logprobs, errors = tokens.logprobs, tokens.errors
        sampled = (seq for seq, is_sampled in zip(flight.sequences, flight.plan.is_sampled, strict=True) if is_sampled)
        for place, (seq, token_id) in enumerate(zip(sampled, tokens.token_ids, strict=True)):
            if seq.status is Status.FINISHED:
                continue
            token_ids = seq.token_ids
            token_ids.append(token_id)
            reported = None
            if logprobs is not None and (entry := logprobs[place]) is not None:
                reported = [entry]
            delta = SequenceDelta(
                seq.request.request_id, [token_id], reported, None, None, None, seq.num_cached_tokens or 0, None
            )
            deltas.append(delta)
            if seq.prompt_logprobs is not None:
                delta.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
            if len(token_ids) >= seq.max_len or token_id in seq.stop_token_ids or place in errors:
                self._judge(seq, delta, errors.get(place))
                is_any_finished = is_any_finished or delta.finish_reason is not None
        if is_any_finished:
            self._drop_ended_decodes()
        return deltas

    def _judge(self, seq: Sequence, delta: SequenceDelta, error: str | None) -> None:
        """Decide whether ``seq`` ends with the token that ``delta`` carries."""
        token_id = delta.token_ids[0]
        if error is not None or len(seq.token_ids) > seq.max_len:  # failed, or scored only: that token is none
            seq.token_ids.pop()
            delta.token_ids, delta.logprobs = [], None
            delta.error = error
            delta.finish_reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
        elif token_id in seq.stop_token_ids and seq.num_output_tokens >= seq.params.min_tokens:
            delta.stop_token_id = token_id
            delta.finish_reason = FinishReason.STOP
        elif len(seq.token_ids) >= seq.max_len:
            delta.finish_reason = FinishReason.LENGTH
        if delta.finish_reason is not None:
            self._finish(seq, delta.finish_reason)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Forget the request; its row and pages follow when no launched step contains them."""
        is_started = seq.status is not Status.WAITING
        seq.status = Status.FINISHED
        del self._sequences[seq.request_id]
        self._num_finished[reason] += 1
        if is_started:
            self._memory.retire(seq, self._committed_step, keep=reason is not FinishReason.ERROR)
