"""What drafts add to a step: tokens that the device must know before it, and more than one sample of a row."""

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from aserve.scheduler.plan import StepPlan


def draft_cells(plan: StepPlan) -> NDArray[np.int64]:
    """Return row, position and token id [3, K] of each of the K drafts of ``plan``, of which there is one at least."""
    verifying = slice(plan.num_decodes, plan.num_decodes + len(plan.drafts))
    spans = zip(plan.rows[verifying], plan.num_computed[verifying], plan.drafts, strict=True)
    cells = [(row, place, token) for row, known, drafts in spans for place, token in enumerate(drafts, known + 1)]
    return np.array(cells, np.int64).T


def as_decodes(plan: StepPlan) -> StepPlan:
    """Return ``plan`` with a decode for each token of a row that verifies drafts; its pages and drafts are left out.

    A decode sees the keys up to its own, those of the same step included. So it is computed as it would be without
    drafts, where a chunk of several queries may round differently.
    """
    if not plan.drafts:
        return plan
    border, end = plan.num_decodes, plan.num_decodes + len(plan.drafts)
    counts = plan.num_scheduled[border:end]
    spans = list(zip(plan.rows[border:end], plan.num_computed[border:end], counts, strict=True))
    num_tokens = sum(counts)
    return StepPlan(
        plan.step_id,
        [*plan.rows[:border], *chain(*([row] * count for row, _, count in spans)), *plan.rows[end:]],
        [
            *plan.num_computed[:border],
            *chain(*(range(first, first + count) for _, first, count in spans)),
            *plan.num_computed[end:],
        ],
        plan.num_scheduled[:border] + [1] * num_tokens + plan.num_scheduled[end:],
        plan.is_sampled[:border] + [True] * num_tokens + plan.is_sampled[end:],
        border + num_tokens,
    )


def sampled_places(plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each of the N samples the place of its row in ``plan``, and how far before the row's last token it is.

    Each [N]. All samples of a row follow each other, the one after its last token at the end.
    """
    places = np.flatnonzero(plan.is_sampled)
    if not plan.drafts:
        return places, np.zeros(len(places), np.int64)
    counts = np.ones(len(places), np.int64)  # what stands before the chunks is sampled, all of it
    counts[plan.num_decodes : plan.num_decodes + len(plan.drafts)] += [len(drafts) for drafts in plan.drafts]
    ends = np.repeat(counts.cumsum(), counts)
    return np.repeat(places, counts), ends - 1 - np.arange(len(ends))
