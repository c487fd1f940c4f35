"""In which order waiting requests start. A request never overtakes one of a smaller rank, however small it is.

The same rank decides who gives way when pages run out: the running sequence of the largest rank.
"""

from collections.abc import Callable

from aserve.registry import Entry, Registry
from aserve.request import Request

Policy = Callable[[Request, int], tuple[int, int]]  # request, number of its arrival -> rank


def rank_by_arrival(request: Request, arrival: int) -> tuple[int, int]:
    """First come, first served."""
    return 0, arrival


def rank_by_priority(request: Request, arrival: int) -> tuple[int, int]:
    """Lower ``priority`` first, then by arrival."""
    return request.priority, arrival


POLICIES: Registry[Policy] = Registry(
    "policy",
    {
        "fcfs": Entry("aserve.scheduler.policy:rank_by_arrival"),
        "priority": Entry("aserve.scheduler.policy:rank_by_priority"),
    },
)
