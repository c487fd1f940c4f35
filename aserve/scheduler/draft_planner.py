"""Which decodes of a step verify drafts, and how many: those that pay, as far as there is room to spare."""

from aserve.scheduler.draft_gain import paying_drafts
from aserve.scheduler.drafter import Draft, Drafter
from aserve.scheduler.limits import Limits
from aserve.scheduler.memory import SequenceMemory
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.token_budget import TokenBudget

MAX_CHUNK_SHARE = 0.5  # of the chunks that a step may have; the others are left to prompts


class DraftPlanner:
    """Trims what a drafter proposes to the room in the step, in the pool and in each sequence."""

    def __init__(self, drafter: Drafter, limits: Limits, memory: SequenceMemory) -> None:
        self._drafter = drafter
        self._memory = memory
        self._budget = TokenBudget(limits.context_cost)
        most_drafts, most_chunks = limits.max_num_drafts, limits.max_num_chunks
        self._max_num_drafts = limits.max_num_batched_tokens if most_drafts is None else most_drafts
        self._max_num_rows = limits.max_num_seqs if most_chunks is None else int(most_chunks * MAX_CHUNK_SHARE)

    def choose(self, batch: list[Sequence], budget: float, num_spare_pages: int) -> list[tuple[Sequence, list[int]]]:
        """Return the sequences of ``batch`` that are to verify drafts, with these, and give them pages for both.

        ``budget`` is what the step has left beside one token of each; ``num_spare_pages`` are left to the others.
        """
        candidates = [seq for seq in batch if seq.can_verify]
        chosen: list[tuple[Sequence, list[int]]] = []
        num_left = self._max_num_drafts
        guesses = zip(candidates, self._drafter.propose(candidates), strict=True)
        proposed = sorted(((seq, draft) for seq, draft in guesses if draft is not None), key=_least_expected_last)
        for seq, draft in paying_drafts(proposed[: self._max_num_rows], len(batch)):
            first = seq.num_computed + 1  # where the drafts stand; one more token is sampled after them
            room = min(num_left, seq.max_len - 1 - first, self._budget.largest_chunk(budget, first))
            if room <= 0:
                continue
            end = self._memory.reserve(seq, first + min(room, len(draft.token_ids)), num_spare_pages)
            if end > first:
                chosen.append((seq, draft.token_ids[: end - first]))
                num_left -= end - first
                budget -= self._budget.cost(end - first, first)
        return chosen


def _least_expected_last(proposal: tuple[Sequence, Draft]) -> float:
    return -proposal[1].num_expected
