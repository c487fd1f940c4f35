"""Which decodes of a step verify drafts, and how many: those that pay, as far as there is room to spare."""

from aserve.scheduler.draft_gain import pays_for_row, pays_for_step
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
        guesses = zip(candidates, self._drafter.propose(candidates), strict=True)
        proposed = [(seq, draft.cut(seq.max_len - 1 - _start(seq))) for seq, draft in guesses if draft is not None]
        trimmed = self._trim(sorted(proposed, key=_least_expected_last), budget, num_spare_pages)
        if not pays_for_step([draft for _, draft in trimmed], len(batch)):
            return []
        for seq, draft in trimmed:
            self._memory.reserve(seq, _start(seq) + len(draft.token_ids))
        return [(seq, draft.token_ids) for seq, draft in trimmed]

    def _trim(
        self, proposed: list[tuple[Sequence, Draft]], budget: float, num_spare_pages: int
    ) -> list[tuple[Sequence, Draft]]:
        """Cut drafts to the room that those before leave; what then does not pay for its row takes none."""
        trimmed: list[tuple[Sequence, Draft]] = []
        num_left = self._max_num_drafts
        for seq, whole in proposed:
            if len(trimmed) == self._max_num_rows:
                break
            start = _start(seq)
            room = min(num_left, self._budget.largest_chunk(budget, start), len(whole.token_ids))
            end = self._memory.count_room(seq, start + room, num_spare_pages)
            draft = whole.cut(end - start)
            if pays_for_row(draft):
                trimmed.append((seq, draft))
                num_left -= end - start
                budget -= self._budget.cost(end - start, start)
                num_spare_pages += self._memory.count_missing_pages(seq, end)
        return trimmed


def _start(seq: Sequence) -> int:
    """Return where drafts stand, after the token that is known; one more is sampled after them."""
    return seq.num_computed + 1


def _least_expected_last(proposal: tuple[Sequence, Draft]) -> float:
    return -proposal[1].num_expected
