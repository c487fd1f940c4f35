"""The tree and the allocator together: eviction on demand, duplicates, and the switch."""

import pytest

from aserve.cache.prefix_cache import PrefixCache


def test_allocation_evicts_what_nobody_uses() -> None:
    cache = PrefixCache(4, 2)
    first = cache.allocate(3)
    cache.insert([1, 2, 3, 4, 5, 6], first)
    assert (cache.num_free, cache.num_cached, cache.num_available) == (1, 3, 4)
    second = cache.allocate(2)
    assert first[2] in second
    assert (cache.num_free, cache.num_cached) == (0, 2)
    cache.check_integrity(second)


def test_locked_pages_are_not_evicted_and_nothing_is_lost_trying() -> None:
    cache = PrefixCache(4, 1)
    pages = cache.allocate(3)
    node, _ = cache.insert([5, 6], pages[:2])
    cache.insert([9], pages[2:])
    cache.lock(node)
    assert cache.allocate(3) is None
    assert (cache.num_free, cache.num_cached) == (1, 1)
    assert cache.match([9], 1)[1] == pages[2:]
    cache.unlock(node)
    assert len(cache.allocate(4)) == 4
    assert cache.match([5, 6], 2)[1] == []


def test_duplicates_stay_with_the_caller() -> None:
    cache = PrefixCache(6, 2)
    mine, theirs = cache.allocate(2), cache.allocate(3)
    cache.insert([1, 2, 3, 4], theirs[:2])
    node, pages = cache.insert([1, 2, 3, 4], mine)
    assert pages == theirs[:2]
    cache.check_integrity([*mine, theirs[2]])
    cache.free(mine)
    cache.check_integrity([theirs[2]])
    assert cache.match([1, 2, 3, 4, 5], 5) == (node, theirs[:2])


def test_switched_off_it_finds_and_keeps_nothing() -> None:
    cache = PrefixCache(4, 2, is_enabled=False)
    pages = cache.allocate(2)
    assert cache.insert([1, 2, 3, 4], pages) == (cache.root, [])
    assert cache.match([1, 2, 3, 4], 4) == (cache.root, [])
    cache.check_integrity(pages)
    cache.free(pages)
    assert cache.num_free == cache.num_available == 4


def test_integrity_needs_every_page_exactly_once() -> None:
    cache = PrefixCache(4, 2)
    pages = cache.allocate(2)
    cache.check_integrity(pages)
    with pytest.raises(AssertionError, match="are not 4"):
        cache.check_integrity(pages[:1])
    with pytest.raises(AssertionError, match="two owners"):
        cache.check_integrity([pages[0], pages[0]])
