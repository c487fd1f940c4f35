"""The requests that are served, from ``add`` to the last token: no device, no clock, no event loop.

The planner decides what a step computes, its commit (``step_commit``) turns what was sampled into deltas.

Plans may be made while earlier ones are in flight: the next input of a sequence whose token is not yet known on
the host waits on the device.
"""

import secrets
from collections import deque
from collections.abc import Callable

from aserve.errors import CapacityError, ClientError
from aserve.request import FinishReason, Request
from aserve.scheduler.admission import check_request, check_tokens, longest_len
from aserve.scheduler.delta import SequenceDelta
from aserve.scheduler.draft_planner import DraftPlanner
from aserve.scheduler.drafter import Drafter, can_verify
from aserve.scheduler.limits import Limits
from aserve.scheduler.memory import SequenceMemory
from aserve.scheduler.plan import StepPlan, StepTokens
from aserve.scheduler.planner import Flight, StepPlanner
from aserve.scheduler.policy import POLICIES
from aserve.scheduler.sequence import Sequence, Status
from aserve.scheduler.stats import SchedulerStats
from aserve.scheduler.step_commit import StepCommit

OBJECT_WEIGHT = 256  # a node, sequence or logprob takes as long to copy as this many tokens


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
        lease_fraction: float = 0.0,
        drafter: Drafter | None = None,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.limits = limits
        self._eos_token_ids = eos_token_ids
        self._rank = POLICIES.load(policy)
        self._max_queued_requests = max_queued_requests
        self._fresh_seed = fresh_seed
        self._memory = SequenceMemory(limits, prefix_cache=prefix_cache, lease_fraction=lease_fraction)
        self._drafter = drafter
        drafts = None if drafter is None else DraftPlanner(drafter, limits, self._memory)
        self._planner = StepPlanner(limits, self._memory, drafts)
        self._sequences: dict[str, Sequence] = {}  # all unfinished
        self._flights: deque[Flight] = deque()
        self._launched_step = 0
        self._committed_step = 0
        self._num_arrivals = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold neither row nor pages, preempted ones included."""
        return self._planner.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that have started and not finished."""
        return self._planner.num_running

    @property
    def num_in_flight(self) -> int:
        """Plans that were handed out and not committed."""
        return len(self._flights)

    @property
    def has_unfinished(self) -> bool:
        """True while any request waits or runs."""
        return bool(self._sequences)

    @property
    def weight(self) -> int:
        """How much there is to copy, in tokens: those held and waiting, and what objects amount to."""
        cache = self._memory.cache
        num_held = (cache.num_pages - cache.num_free) * cache.page_size
        num_waiting = sum(len(seq.token_ids) for seq in self._sequences.values() if seq.status is Status.WAITING)
        num_logprobs = sum(len(seq.prompt_logprobs or ()) for seq in self._sequences.values())
        num_objects = cache.tree.num_nodes + len(self._sequences) + num_logprobs
        drafter_weight = 0 if self._drafter is None else self._drafter.weight
        return num_held + num_waiting + drafter_weight + OBJECT_WEIGHT * num_objects

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
            num_leased_pages=self._memory.leases.num_pages,
            num_preemptions=self._planner.num_preemptions,
            num_prefix_tokens_queried=self._memory.num_tokens_queried,
            num_prefix_tokens_hit=self._memory.num_tokens_hit,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    def add(self, request: Request, *, are_tokens_checked: bool = False) -> None:
        """Queue ``request``; ``are_tokens_checked`` saves a look at each token of a prompt that is known to be right.

        Raises ClientError if it can never run, CapacityError if the queue is full.
        """
        check_request(request, self.limits)
        if not are_tokens_checked:
            check_tokens(request.prompt_token_ids, self.limits)
        if request.request_id in self._sequences:
            raise ClientError(f"request id {request.request_id!r} is in use", param="request_id")
        if self.num_waiting >= self._max_queued_requests:
            raise CapacityError(f"{self.num_waiting} requests are waiting already")
        seq = self._make_sequence(request)
        self._sequences[request.request_id] = seq
        self._planner.enter(seq)
        if request.lease is not None:
            self._memory.leases.open(request.lease)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request at once; no delta follows. False if it has ended already or was never known."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        if reason is not FinishReason.ERROR and seq.num_output_tokens:  # found at once, like what ends by itself
            self._memory.publish(seq, len(seq.token_ids) - 1)
        self._finish(seq, reason)
        return True

    def end_lease(self, holder: str) -> None:
        """Give up what ``holder`` has leased; its requests that still run leave nothing behind. Idempotent."""
        self._memory.leases.close(holder)

    def schedule(self) -> StepPlan | None:
        """Return the next plan to launch; None if there is nothing to do before a plan in flight is committed."""
        if not self.has_unfinished:
            return None
        self._memory.repoint(self._committed_step)
        flight = self._planner.plan(self._launched_step + 1, is_idle=not self._flights)
        if flight is None:
            if not self._flights:
                raise RuntimeError("there is work, but none of it can be planned")
            return None
        flight.plan.page_updates = self._memory.take_page_updates()
        self._launched_step = flight.plan.step_id
        self._flights.append(flight)
        return flight.plan

    def commit(self, tokens: StepTokens) -> list[SequenceDelta]:
        """Take the tokens of the oldest plan in flight; return what is new for each sequence that got any."""
        if not self._flights:
            raise ValueError("no plan is in flight")
        plan = self._flights[0].plan
        if tokens.step_id != plan.step_id or len(tokens.token_ids) != plan.num_sampled:
            raise ValueError(f"step {plan.step_id} must be committed next, with one token for each sample")
        flight = self._flights.popleft()
        self._committed_step = plan.step_id
        commit = StepCommit(flight, tokens, self._memory, self._planner, self._finish)
        deltas = commit.run()
        self._num_draft_tokens += commit.num_draft_tokens
        self._num_accepted_tokens += commit.num_accepted_tokens
        self._memory.settle(plan.step_id)
        return deltas

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant about pages, rows, locks or states is broken."""
        running = [seq for seq in self._sequences.values() if seq.status is not Status.WAITING]
        self._planner.check_integrity(running)
        self._memory.check_integrity(running)
        assert self.num_waiting + len(running) == len(self._sequences), "a waiting sequence is not in the queue"
        for seq in running:
            assert len(seq.token_ids) + seq.num_pending <= max(seq.max_len, seq.prompt_len + 1), "ran past its end"
            is_awaited = seq.status in (Status.DRAINING, Status.VERIFYING)
            assert self._flights or not is_awaited, "a sequence waits for a step that is not there"
        if not self.has_unfinished and not self._flights:
            cache = self._memory.cache
            num_held = cache.num_pages - cache.num_available
            assert num_held <= self._memory.leases.num_pages, "pages are held though nothing runs"

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
            can_verify=self._drafter is not None and can_verify(params),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Forget the request; its row and pages follow when no launched step contains them."""
        self._planner.leave(seq)
        is_running = seq.status is not Status.WAITING
        seq.status = Status.FINISHED
        del self._sequences[seq.request_id]
        if self._drafter is not None:
            self._drafter.leave(seq)
        if is_running:
            self._memory.retire(seq, self._committed_step, keep=reason is not FinishReason.ERROR)
