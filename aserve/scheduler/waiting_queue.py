"""The sequences that wait for a row and pages, in the order of their rank."""

from bisect import bisect_left, insort

from aserve.scheduler.sequence import Sequence


class WaitingQueue:
    """A sorted list: at queue lengths of a thousand a memmove beats any cleverer structure."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, int], Sequence]] = []  # ranks are unique, so sequences never compare

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first(self) -> Sequence:
        """The one to start next."""
        return self._entries[0][1]

    def push(self, seq: Sequence) -> None:
        """Enter by rank; a preempted sequence so returns before all that arrived after it."""
        insort(self._entries, (seq.rank, seq))

    def remove(self, seq: Sequence) -> None:
        """Take out ``seq``, which must be here."""
        position = bisect_left(self._entries, (seq.rank,))
        assert self._entries[position][1] is seq, "the waiting queue is out of order"
        del self._entries[position]
