"""Whether drafts pay: what those of a step may bring, against what the step then costs everyone in it."""

from aserve.scheduler.drafter import Draft
from aserve.scheduler.sequence import Sequence

ROW_COST = 1.0  # tokens: a row that verifies misses the step after; where nobody goes on, the device waits for the host
STEP_COST = 0.4  # tokens of each row: on a GPU such a step takes 0.2 longer; twice that, since gains are only expected


def paying_drafts(proposed: list[tuple[Sequence, Draft]], num_rows: int) -> list[tuple[Sequence, Draft]]:
    """Return those of ``proposed`` that bring their row more than they cost it: all, or none if the step loses by them.

    ``num_rows`` share the step, with drafts or without.
    """
    paying = [(seq, draft) for seq, draft in proposed if draft.num_expected > ROW_COST]
    gain = sum(draft.num_expected - ROW_COST for _, draft in paying)
    return paying if gain >= STEP_COST * num_rows else []
