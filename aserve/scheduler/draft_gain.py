"""Whether drafts pay: what those of a step may bring, against what the step then costs everyone in it."""

from aserve.scheduler.drafter import Draft

ROW_COST = 1.0  # tokens: a row that verifies misses the step after; where nobody goes on, the device waits for the host
STEP_COST = 0.4  # tokens of each row: on a GPU such a step takes 0.2 longer; twice that, since gains are only expected


def pays_for_row(draft: Draft) -> bool:
    """Whether ``draft`` brings its row more than it costs it."""
    return draft.num_expected > ROW_COST


def pays_for_step(drafts: list[Draft], num_rows: int) -> bool:
    """Whether ``drafts``, which pay for their rows, bring as much as all ``num_rows`` of their step lose by them."""
    return sum(draft.num_expected - ROW_COST for draft in drafts) >= STEP_COST * num_rows
