"""Pages that stay locked in the prefix tree though nobody computes with them: the conversations of open sockets.

A lease keeps the pages of its holder's latest turn until the next turn has ended, so that the turn in between finds
them. Leases take a bounded part of the pool and give way, the oldest first, whenever a request needs pages.
"""

from collections import OrderedDict
from collections.abc import Iterator

from aserve.cache.prefix_cache import PrefixCache
from aserve.cache.radix_tree import RadixNode


class LeaseTable:
    """One lease for each open holder, at most ``max_pages`` pages together; each lock is one of the prefix cache.

    Pages that two leases share are counted twice, so there may be room left when an old lease is dropped.
    """

    def __init__(self, cache: PrefixCache, max_pages: int) -> None:
        self.num_pages = 0
        self.is_paused = False  # while a request waits for pages
        self._cache = cache
        self._max_pages = max_pages
        self._open: set[str] = set()
        self._leases: OrderedDict[str, tuple[RadixNode, int]] = OrderedDict()  # by when they were taken

    def __len__(self) -> int:
        """Return the number of leases."""
        return len(self._leases)

    def open(self, holder: str) -> None:
        """Let ``holder`` take leases from now on. Idempotent."""
        self._open.add(holder)

    def close(self, holder: str) -> None:
        """Take no more leases for ``holder``, and drop the one it has. Idempotent."""
        self._open.discard(holder)
        self._drop(holder)

    def hold(self, holder: str, node: RadixNode, num_pages: int) -> None:
        """Lock the ``num_pages`` pages up to ``node`` in place of what ``holder`` has; does nothing once it is closed.

        While ``is_paused`` nothing is locked: what has just been given back is for a request that waits.
        """
        if holder not in self._open:
            return
        if 0 < num_pages <= self._max_pages and not self.is_paused:
            self._cache.lock(node)
            self._drop(holder)
            self._leases[holder] = (node, num_pages)
            self.num_pages += num_pages
            while self.num_pages > self._max_pages:
                self.drop_oldest()
        else:
            self._drop(holder)

    def drop_oldest(self) -> bool:
        """Make the pages of the oldest lease evictable; False if there is no lease."""
        if not self._leases:
            return False
        self._drop(next(iter(self._leases)))
        return True

    def make_room(self, num_pages: int) -> bool:
        """Drop leases until ``num_pages`` pages can be allocated; False if they cannot even without any."""
        while num_pages > self._cache.num_available and self.drop_oldest():
            pass
        return num_pages <= self._cache.num_available

    def nodes(self) -> Iterator[RadixNode]:
        """Yield the end of each lease; for integrity checks."""
        for node, _ in self._leases.values():
            yield node

    def _drop(self, holder: str) -> None:
        lease = self._leases.pop(holder, None)
        if lease is not None:
            node, num_pages = lease
            self.num_pages -= num_pages
            self._cache.unlock(node)
