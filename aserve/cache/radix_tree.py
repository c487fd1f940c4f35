"""A radix tree from token ids to KV pages, in whole pages.

Owns the order of eviction and who may not be evicted; does not own the pages' allocation. One edge
key is one full page of token ids, so two prompts share a node exactly as far as their pages are equal.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice

PageKey = int | tuple[int, ...]


def page_keys(token_ids: Sequence[int], page_size: int, num_pages: int) -> list[PageKey]:
    """Return one key for each of the first ``num_pages`` full pages of ``token_ids``."""
    tokens = islice(token_ids, num_pages * page_size)
    if page_size == 1:
        return list(tokens)
    return list(zip(*[tokens] * page_size, strict=False))  # drops a last page that is not full


class RadixNode:
    """A run of pages without a branch. Locked while ``num_locks`` > 0; a lock covers all ancestors too."""

    __slots__ = ("children", "is_queued", "keys", "last_used", "num_locks", "pages", "parent")

    def __init__(self, parent: "RadixNode | None", keys: list[PageKey], pages: list[int], last_used: int) -> None:
        self.parent = parent
        self.keys = keys
        self.pages = pages
        self.last_used = last_used
        self.children: dict[PageKey, RadixNode] = {}  # by the first key of the child
        self.num_locks = 0
        self.is_queued = False


class RadixTree:
    """Finds, keeps and evicts the pages of known token prefixes.

    ``last_used`` is a logical clock: every match and insert is one tick and stamps the whole path it
    walked. A node never holds pages of different ticks, since a walk that ends inside a node splits it.
    """

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.root = RadixNode(None, [], [], 0)
        self.num_evictable = 0  # pages in nodes without a lock
        self.num_nodes = 0  # without the root
        self._clock = 0
        self._num_queued = 0  # breaks ties, so that nodes are never compared
        # Each unlocked leaf stands here once, with a time no later than its own. Entries of nodes that
        # were touched, locked or extended since are put right when they surface.
        self._leaves: list[tuple[int, int, RadixNode]] = []

    def match(self, token_ids: Sequence[int], max_tokens: int | None = None) -> tuple[RadixNode, list[int]]:
        """Return the deepest node and the pages of the longest known prefix, at most ``max_tokens`` long.

        The node ends exactly where the pages end. Lock it before anything else may evict it.
        """
        num_tokens = len(token_ids) if max_tokens is None else min(max_tokens, len(token_ids))
        return self._walk(page_keys(token_ids, self.page_size, num_tokens // self.page_size))

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> tuple[RadixNode, list[int]]:
        """Make ``pages`` findable under the first ``len(pages)`` full pages of ``token_ids``.

        Returns the node at their end and the tree's own pages for them. Where these differ from
        ``pages`` the tree knew the prefix already and did not take the page given; all others now belong to the tree.
        """
        keys = page_keys(token_ids, self.page_size, len(pages))
        assert len(keys) == len(pages), "more pages than full pages of tokens"
        node, known = self._walk(keys)
        num_known = len(known)
        if num_known == len(keys):
            return node, known
        leaf = RadixNode(node, keys[num_known:], list(pages[num_known:]), self._clock)
        node.children[leaf.keys[0]] = leaf
        self.num_nodes += 1
        self.num_evictable += len(leaf.pages)
        self._queue(leaf)
        return leaf, known + leaf.pages

    def lock(self, node: RadixNode) -> None:
        """Keep ``node`` and all its ancestors from eviction until unlocked as often."""
        step: RadixNode | None = node
        while step is not None:
            if step.num_locks == 0:
                self.num_evictable -= len(step.pages)
            step.num_locks += 1
            step = step.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one ``lock`` of ``node``."""
        step: RadixNode | None = node
        while step is not None:
            assert step.num_locks > 0, "unlocked more often than locked"
            step.num_locks -= 1
            if step.num_locks == 0:
                self.num_evictable += len(step.pages)
                self._queue(step)
            step = step.parent

    def evict(self, num_pages: int) -> list[int]:
        """Drop ``num_pages`` pages, or all evictable ones if they are fewer, and return their numbers.

        Takes the leaf used longest ago first, from its end, so a prefix outlives what follows it.
        """
        evicted: list[int] = []
        while len(evicted) < num_pages and self._leaves:
            queued_at, _, node = heappop(self._leaves)
            node.is_queued = False
            if node.num_locks or node.children:
                continue
            if queued_at != node.last_used:
                self._queue(node)
                continue
            self._trim(node, num_pages - len(evicted), evicted)
        self.num_evictable -= len(evicted)
        return evicted

    def nodes(self) -> Iterator[RadixNode]:
        """Yield every node but the root; for integrity checks."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if links, lock counts, sums or the eviction queue disagree."""
        queued = {id(node) for _, _, node in self._leaves}
        num_nodes = num_evictable = 0
        for node in self.nodes():
            assert node.parent is not None, "a node without a parent"
            assert node.parent.children.get(node.keys[0]) is node, "a link is broken"
            assert len(node.keys) == len(node.pages) > 0, "a node's keys and pages differ in number"
            assert node.parent.num_locks >= node.num_locks, "a locked node's parent is not locked"
            assert node.parent is self.root or node.parent.last_used >= node.last_used, "a parent is older"
            num_nodes += 1
            if not node.num_locks:
                num_evictable += len(node.pages)
                assert node.children or id(node) in queued, "an unlocked leaf cannot be evicted"
        assert (num_nodes, num_evictable) == (self.num_nodes, self.num_evictable), "sums drifted"
        assert len(queued) == len(self._leaves), "a leaf is queued twice"

    def _walk(self, keys: list[PageKey]) -> tuple[RadixNode, list[int]]:
        """Follow ``keys`` from the root as far as they are known, stamping the path."""
        self._clock += 1
        node, pages = self.root, list[int]()
        while len(pages) < len(keys):
            child = node.children.get(keys[len(pages)])
            if child is None:
                break
            num_equal = self._count_equal(child.keys, keys, len(pages))
            node = child if num_equal == len(child.keys) else self._split(child, num_equal)
            node.last_used = self._clock
            pages += node.pages
        return node, pages

    @staticmethod
    def _count_equal(edge: list[PageKey], keys: list[PageKey], start: int) -> int:
        rest = keys[start : start + len(edge)]
        if rest == edge:
            return len(edge)
        for num_equal, (left, right) in enumerate(zip(edge, rest, strict=False)):
            if left != right:
                return num_equal
        return len(rest)

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Cut ``node`` after ``num_pages`` pages and return the new upper part.

        The lower part stays the same object, because a lock on it must go on covering the whole run.
        Both parts keep the time of the old node until the caller stamps the upper one.
        """
        assert node.parent is not None, "the root has no pages to split"
        upper = RadixNode(node.parent, node.keys[:num_pages], node.pages[:num_pages], node.last_used)
        upper.num_locks = node.num_locks
        node.parent.children[upper.keys[0]] = upper
        node.keys = node.keys[num_pages:]
        node.pages = node.pages[num_pages:]
        node.parent = upper
        upper.children[node.keys[0]] = node
        self.num_nodes += 1
        return upper

    def _trim(self, node: RadixNode, max_pages: int, evicted: list[int]) -> None:
        """Move up to ``max_pages`` pages from the end of a leaf to ``evicted``; an empty leaf leaves the tree."""
        assert node.parent is not None, "the root is never evicted"
        first_key = node.keys[0]
        num_kept = max(0, len(node.pages) - max_pages)
        evicted.extend(reversed(node.pages[num_kept:]))
        del node.pages[num_kept:], node.keys[num_kept:]
        if num_kept:
            self._queue(node)
            return
        del node.parent.children[first_key]
        self.num_nodes -= 1
        self._queue(node.parent)

    def _queue(self, node: RadixNode) -> None:
        """Offer ``node`` for eviction if it is an unlocked leaf that is not on offer yet."""
        if not (node.is_queued or node.num_locks or node.children or node.parent is None):
            node.is_queued = True
            self._num_queued += 1
            heappush(self._leaves, (node.last_used, self._num_queued, node))
