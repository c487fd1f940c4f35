"""The mutable state of one request while the scheduler knows it."""

from dataclasses import dataclass, field
from enum import Enum, auto

from aserve.cache.radix_tree import RadixNode
from aserve.request import Request, SamplingParams, TokenLogprobs


class Status(Enum):
    """Where a sequence stands; all but WAITING and FINISHED are running."""

    WAITING = auto()  # holds neither row nor pages; also after preemption
    PREFILLING = auto()  # has tokens whose sampling is not yet planned
    DECODING = auto()  # one more token whenever planned
    VERIFYING = auto()  # drafts are in flight: how far it got is known when their step is committed
    DRAINING = auto()  # its last possible token is in flight
    FINISHED = auto()  # may still hold row and pages, until its last launched step is committed


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, its tokens and what it holds.

        token_ids   | prompt | committed outputs |            known on the host
        on device   | prompt | committed outputs | pending |  sampled, not yet committed
        KV          |------- num_computed -----------|        counts launched steps as done, drafts as accepted

    ``pages[:num_shared_pages]`` belong to the prefix tree and are locked through ``node``; the rest is its own.
    """

    request: Request
    seed: int
    rank: tuple[int, int]  # smaller starts earlier and is preempted later; unique
    stop_token_ids: frozenset[int]
    max_len: int  # prompt and output together
    token_ids: list[int]
    prompt_len: int
    node: RadixNode
    can_verify: bool = False  # whether drafts may be made for it
    status: Status = Status.WAITING
    row: int = -1
    pages: list[int] = field(default_factory=list)
    num_shared_pages: int = 0
    num_computed: int = 0
    next_event: int = 0  # the num_computed at which a decode needs a page or may not go on
    last_step: int = 0  # the last launched step that contains it
    repointed: list[tuple[int, int]] = field(default_factory=list)  # (page index, duplicate still owned)
    num_cached_tokens: int = 0  # found in the prefix cache at its first start
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None: not asked for, or delivered

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.params

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_pending(self) -> int:
        """Tokens sampled by launched steps and not yet known on the host; with drafts, as many as there can be."""
        if self.status in (Status.WAITING, Status.PREFILLING):
            return 0
        return self.num_computed + 1 - len(self.token_ids)
