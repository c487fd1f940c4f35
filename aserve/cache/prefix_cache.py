"""The page pool as sequences see it: free pages, and pages kept for prompts with the same beginning.

Every page is free, in the tree (locked by a sequence that uses it, or evictable), or owned by one sequence.
"""

from collections.abc import Iterable, Sequence

from aserve.cache.page_allocator import PageAllocator
from aserve.cache.radix_tree import RadixNode, RadixTree


class PrefixCache:
    """A page allocator that evicts from a radix tree when it runs dry.

    Switched off it finds and keeps nothing, and is then a plain allocator.
    """

    def __init__(self, num_pages: int, page_size: int, *, is_enabled: bool = True) -> None:
        self.page_size = page_size
        self.is_enabled = is_enabled
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixTree(page_size)

    @property
    def num_pages(self) -> int:
        """All pages of the pool."""
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self.allocator.num_free

    @property
    def num_cached(self) -> int:
        """Pages that hold a known prefix nobody uses now; they are evicted on demand."""
        return self.tree.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can give."""
        return self.allocator.num_free + self.tree.num_evictable

    @property
    def root(self) -> RadixNode:
        """The node of the empty prefix."""
        return self.tree.root

    def match(self, token_ids: Sequence[int], max_tokens: int) -> tuple[RadixNode, list[int]]:
        """Return the node and pages of the longest known prefix of at most ``max_tokens``; see ``lock``."""
        if not self.is_enabled:
            return self.tree.root, []
        return self.tree.match(token_ids, max_tokens)

    def lock(self, node: RadixNode) -> None:
        """Keep the pages up to ``node`` from eviction; each holder locks for itself."""
        self.tree.lock(node)

    def unlock(self, node: RadixNode) -> None:
        """Undo one ``lock``."""
        self.tree.unlock(node)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Return ``num_pages`` pages that the caller owns, evicting what it takes; None if there are not as many."""
        num_missing = num_pages - self.allocator.num_free
        if num_missing > 0:
            if num_missing > self.tree.num_evictable:
                return None
            self.allocator.free(self.tree.evict(num_missing))
        return self.allocator.allocate(num_pages)

    def free(self, pages: Iterable[int]) -> None:
        """Take back pages that the caller owned."""
        self.allocator.free(pages)

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> tuple[RadixNode, list[int]]:
        """Publish ``pages``, which hold the KV of the first ``len(pages)`` full pages of ``token_ids``.

        Returns the node at their end and the tree's pages. Where the tree's page differs from the one
        given, the given one stays the caller's, who must point its page table at the tree's before it frees its own.
        """
        if not self.is_enabled:
            return self.tree.root, []
        return self.tree.insert(token_ids, pages)

    def check_integrity(self, owned_pages: Sequence[int]) -> None:
        """Raise AssertionError unless free, tree and ``owned_pages`` together are all pages, each once."""
        self.tree.check_integrity()
        cached = [page for node in self.tree.nodes() for page in node.pages]
        free = self.allocator.free_pages()
        every_page = [*free, *cached, *owned_pages]
        assert len(every_page) == self.num_pages, (
            f"{len(free)} free + {len(cached)} in the tree + {len(owned_pages)} owned pages are not {self.num_pages}"
        )
        assert len(set(every_page)) == self.num_pages, "a page has two owners"
