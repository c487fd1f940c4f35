"""Pages are handed out once, taken back once, and the dummy page is not among them."""

import pytest

from aserve.cache.page_allocator import PageAllocator


def test_every_page_is_handed_out_once() -> None:
    allocator = PageAllocator(10)
    pages = allocator.allocate(4) + allocator.allocate(6)
    assert sorted(pages) == list(range(10))
    assert allocator.num_free == 0
    assert allocator.allocate(1) is None


def test_nothing_is_taken_when_there_are_too_few() -> None:
    allocator = PageAllocator(3)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3
    assert allocator.allocate(0) == []
    assert allocator.num_free == 3


def test_freed_pages_come_back() -> None:
    allocator = PageAllocator(3)
    pages = allocator.allocate(3)
    allocator.free(pages[:2])
    assert allocator.num_free == 2
    assert sorted(allocator.allocate(2)) == sorted(pages[:2])


def test_double_free_is_detected() -> None:
    allocator = PageAllocator(3)
    page = allocator.allocate(1)[0]
    allocator.free([page])
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free([page])
    with pytest.raises(ValueError, match="freed twice"):
        PageAllocator(3).free([0])


@pytest.mark.parametrize("page", [-1, 3, 4])
def test_foreign_pages_are_detected(page: int) -> None:
    allocator = PageAllocator(3)  # 3 is the dummy page
    allocator.allocate(3)
    with pytest.raises(ValueError, match="not one of the 3 pages"):
        allocator.free([page])


def test_free_pages_finds_a_damaged_list() -> None:
    allocator = PageAllocator(3)
    assert allocator.free_pages() == {0, 1, 2}
    allocator._free.append(1)
    with pytest.raises(AssertionError):
        allocator.free_pages()


def test_a_pool_has_at_least_one_page() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(0)
