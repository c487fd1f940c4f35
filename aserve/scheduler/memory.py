"""Rows of the page table and pages of the pool: which sequence holds what, and when it gives it back.

The device executes steps in order but later than they are planned. So what a launched step may still read or
write is given back only once that step is committed.
"""

from collections.abc import Iterable

from aserve.cache.lease_table import LeaseTable
from aserve.cache.prefix_cache import PrefixCache
from aserve.cache.radix_tree import RadixNode
from aserve.scheduler.limits import Limits
from aserve.scheduler.sequence import Sequence, Status


class SequenceMemory:
    """Gives rows and pages to sequences and collects the page table's changes for the next plan."""

    def __init__(self, limits: Limits, *, prefix_cache: bool, lease_fraction: float = 0.0) -> None:
        self.cache = PrefixCache(limits.num_pages, limits.page_size, is_enabled=prefix_cache)
        self.leases = LeaseTable(self.cache, int(limits.num_pages * lease_fraction))
        self.num_tokens_queried = 0
        self.num_tokens_hit = 0
        self._page_size = limits.page_size
        self._num_rows = limits.max_num_seqs
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._page_updates: dict[tuple[int, int], int] = {}  # the last write to a cell wins
        self._repointed: list[Sequence] = []
        self._retiring: list[tuple[Sequence, bool]] = []
        self._duplicates: list[tuple[int, list[int]]] = []  # (step that may still read them, pages)

    @property
    def num_free_rows(self) -> int:
        """Sequences that may still start."""
        return len(self._free_rows)

    def start(self, seq: Sequence, *, use_prefix: bool, num_spare_pages: int) -> bool:
        """Give ``seq`` a row and pages for all its tokens, found ones first.

        False, with nothing changed, if that would leave fewer than ``num_spare_pages`` for the others.
        """
        num_tokens = len(seq.token_ids)
        # At least one token must be computed, for its logits.
        node, pages = self.cache.match(seq.token_ids, num_tokens - 1 if use_prefix else 0)
        self.cache.lock(node)
        num_new = -(-num_tokens // self._page_size) - len(pages)
        fits = self.leases.make_room(num_new + num_spare_pages)
        self.leases.is_paused = not fits
        new_pages = self.cache.allocate(num_new) if fits else None
        if new_pages is None:
            self.cache.unlock(node)
            return False
        seq.node, seq.num_shared_pages = node, len(pages)
        seq.pages = pages + new_pages
        seq.num_computed = len(pages) * self._page_size
        seq.row = self._free_rows.pop()
        self._page_updates.update(((seq.row, index), page) for index, page in enumerate(seq.pages))
        self._note_capacity(seq)
        if self.cache.is_enabled and use_prefix:
            self.num_tokens_queried += num_tokens
            self.num_tokens_hit += seq.num_computed
        return True

    def extend(self, seq: Sequence) -> bool:
        """Give ``seq`` one more page; False if there is none."""
        pages = self.cache.allocate(1)
        if pages is None and self.leases.make_room(1):
            pages = self.cache.allocate(1)
        if pages is None:
            return False
        self._page_updates[seq.row, len(seq.pages)] = pages[0]
        seq.pages += pages
        self._note_capacity(seq)
        return True

    def count_room(self, seq: Sequence, num_tokens: int, num_spare_pages: int) -> int:
        """Return how many of ``num_tokens`` tokens ``seq`` has pages for, or can get them by ``reserve``.

        It can get none that takes a lease, or leaves fewer than ``num_spare_pages`` for the others.
        """
        num_pages = len(seq.pages) + max(self.cache.num_available - num_spare_pages, 0)
        return min(num_tokens, num_pages * self._page_size)

    def count_missing_pages(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many pages ``seq`` lacks for ``num_tokens`` tokens."""
        return max(-(-num_tokens // self._page_size) - len(seq.pages), 0)

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Give ``seq`` the pages that it lacks for ``num_tokens`` tokens, for which there is room."""
        for _ in range(self.count_missing_pages(seq, num_tokens)):
            self.extend(seq)

    def publish(self, seq: Sequence, max_tokens: int | None = None) -> None:
        """Put the full pages of ``seq`` whose tokens are known and computed by a committed step into the prefix tree.

        ``max_tokens`` is what committed steps have computed, where a launched one computes more.

            pages  | shared already | known by now: ours are duplicates | new: now the tree's | still our own |

        Duplicates are replaced by the tree's pages here at once, and in the page table by the next plan. Until then,
        and as long as a launched step may read them, they stay ours.
        """
        num_known = len(seq.token_ids) if max_tokens is None else max_tokens
        num_full = min(seq.num_computed, num_known) // self._page_size
        if num_full <= seq.num_shared_pages or not self.cache.is_enabled:
            return
        node, pages = self.cache.insert(seq.token_ids, seq.pages[:num_full])
        self.cache.lock(node)
        self.cache.unlock(seq.node)
        seq.node = node
        for index in range(seq.num_shared_pages, num_full):
            if seq.pages[index] != pages[index]:
                seq.repointed.append((index, seq.pages[index]))
                seq.pages[index] = pages[index]
        seq.num_shared_pages = num_full
        if seq.repointed:
            self._repointed.append(seq)

    def repoint(self, committed_step: int) -> None:
        """Turn the page table away from duplicates, then free them as soon as no launched step reads them."""
        for seq in self._repointed:
            self._page_updates.update(((seq.row, index), seq.pages[index]) for index, _ in seq.repointed)
            duplicates = [page for _, page in seq.repointed]
            seq.repointed.clear()
            if seq.last_step <= committed_step:
                self.cache.free(duplicates)
            else:
                self._duplicates.append((seq.last_step, duplicates))
        self._repointed.clear()

    def take_page_updates(self) -> list[tuple[int, int, int]]:
        """Return what the page table has to learn, each cell once, and forget it."""
        updates = [(row, index, page) for (row, index), page in self._page_updates.items()]
        self._page_updates.clear()
        return updates

    def release(self, seq: Sequence, *, keep: bool = True) -> None:
        """Take back the row and all pages of ``seq``, which no launched step may contain.

        With ``keep`` its full pages stay findable until evicted, and locked if it ended with a lease.
        """
        if keep:
            self.publish(seq)
        if keep and seq.status is Status.FINISHED and seq.request.lease is not None:
            self.leases.hold(seq.request.lease, seq.node, seq.num_shared_pages)
        self.cache.unlock(seq.node)
        self.cache.free(seq.pages[seq.num_shared_pages :])
        self.cache.free(page for _, page in seq.repointed)
        self._free_rows.append(seq.row)
        seq.repointed.clear()  # so that the next ``repoint`` finds nothing of it
        seq.node, seq.pages, seq.num_shared_pages = self.cache.root, [], 0
        seq.row, seq.num_computed = -1, 0

    def retire(self, seq: Sequence, committed_step: int, *, keep: bool) -> None:
        """Release ``seq``, which has finished, once the last launched step that contains it is committed."""
        if seq.last_step <= committed_step:
            self.release(seq, keep=keep)
        else:
            self._retiring.append((seq, keep))

    def settle(self, committed_step: int) -> None:
        """Give back what only steps up to ``committed_step`` could still use."""
        if self._retiring:
            retiring, self._retiring = self._retiring, []
            for seq, keep in retiring:
                self.retire(seq, committed_step, keep=keep)
        while self._duplicates and self._duplicates[0][0] <= committed_step:
            self.cache.free(self._duplicates.pop(0)[1])

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless rows, pages and locks are those of ``running``, of leases and of what retires."""
        holders = [*running, *(seq for seq, _ in self._retiring)]
        rows = [*self._free_rows, *(seq.row for seq in holders)]
        assert sorted(rows) == list(range(self._num_rows)), "a row has two owners or none"
        owned = [page for _, pages in self._duplicates for page in pages]
        locks: dict[int, int] = {id(self.cache.root): 0}
        for seq in holders:
            owned += seq.pages[seq.num_shared_pages :]
            owned += [page for _, page in seq.repointed]
            assert len(seq.pages) * self._page_size >= seq.num_computed, "a computed token has no page"
            shared = list[int]()
            node: RadixNode | None = seq.node
            while node is not None:
                locks[id(node)] = locks.get(id(node), 0) + 1
                shared[:0] = node.pages
                node = node.parent
            assert shared == seq.pages[: seq.num_shared_pages], "shared pages are not those of the locked path"
        for leased in self.leases.nodes():
            node = leased
            while node is not None:
                locks[id(node)] = locks.get(id(node), 0) + 1
                node = node.parent
        self.cache.check_integrity(owned)
        for known in (self.cache.root, *self.cache.tree.nodes()):
            assert known.num_locks == locks.get(id(known), 0), "a lock has no holder, or a holder no lock"

    def _note_capacity(self, seq: Sequence) -> None:
        seq.next_event = min(len(seq.pages) * self._page_size, seq.max_len - 1)
