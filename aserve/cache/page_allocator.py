"""Which KV pages are free. Owns page numbers only; who holds a page is known to its holder alone."""

from collections.abc import Iterable


class PageAllocator:
    """Hands out the pages ``0 .. num_pages - 1``, each to one owner at a time.

    Numbers from ``num_pages`` on (the dummy page) are foreign: never handed out, never taken back.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is reused first
        self._is_free = bytearray(b"\x01") * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Return ``num_pages`` pages, or None, with nothing taken, if there are not as many."""
        if num_pages > len(self._free):
            return None
        if num_pages == 0:
            return []
        pages = self._free[-num_pages:]
        del self._free[-num_pages:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take ``pages`` back. Raises ValueError at a foreign page or one that is free already."""
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} is not one of the {self.num_pages} pages of this pool")
            if self._is_free[page]:
                raise ValueError(f"page {page} is freed twice")
            self._is_free[page] = 1
            self._free.append(page)

    def free_pages(self) -> frozenset[int]:
        """Return the numbers of all free pages; for integrity checks."""
        assert len(set(self._free)) == len(self._free) == sum(self._is_free), "the free list is damaged"
        return frozenset(self._free)
