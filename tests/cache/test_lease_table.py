"""Leases lock what they hold and nothing else, within a budget, and give way oldest first."""

import random

from aserve.cache.lease_table import LeaseTable
from aserve.cache.prefix_cache import PrefixCache


def insert(cache: PrefixCache, tokens: list[int]) -> None:
    """Publish ``tokens`` as a sequence that has ended would."""
    pages = cache.allocate(len(tokens))
    assert pages is not None
    _, known = cache.insert(tokens, pages)
    cache.free(page for page, kept in zip(pages, known, strict=True) if page != kept)


def lease(table: LeaseTable, cache: PrefixCache, holder: str, tokens: list[int]) -> None:
    node, pages = cache.match(tokens, len(tokens))
    table.hold(holder, node, len(pages))


def test_a_lease_is_locked_until_its_holder_takes_another_or_closes() -> None:
    cache = PrefixCache(16, 1)
    table = LeaseTable(cache, 16)
    table.open("a")
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4, 5])
    lease(table, cache, "a", [1, 2, 3])
    assert (cache.num_available, table.num_pages) == (13, 3)
    lease(table, cache, "a", [1, 2, 4, 5])
    assert (cache.num_available, table.num_pages, len(table)) == (12, 4, 1)
    table.close("a")
    table.close("a")
    assert (cache.num_available, table.num_pages) == (16, 0)
    lease(table, cache, "a", [1, 2, 3])  # a request of a socket that has gone ends late
    assert cache.num_available == 16


def test_the_budget_drops_the_oldest_and_refuses_what_is_larger() -> None:
    cache = PrefixCache(32, 1)
    table = LeaseTable(cache, 8)
    for number, holder in enumerate("abc"):
        table.open(holder)
        insert(cache, [number, 1, 2])
        lease(table, cache, holder, [number, 1, 2])
    assert (len(table), table.num_pages) == (2, 6)
    assert [cache.match([number], 1)[0].num_locks for number in range(3)] == [0, 1, 1]
    insert(cache, list(range(10, 19)))
    lease(table, cache, "b", list(range(10, 19)))
    assert (len(table), table.num_pages) == (1, 3)


def test_leases_give_way_to_requests_and_wait_while_one_waits() -> None:
    cache = PrefixCache(8, 1)
    table = LeaseTable(cache, 8)
    for number, holder in enumerate("ab"):
        table.open(holder)
        insert(cache, [number, 1, 2])
        lease(table, cache, holder, [number, 1, 2])
    assert table.make_room(5) is True
    assert len(table) == 1
    assert cache.match([1, 1, 2], 3)[0].num_locks == 1  # the newer one
    assert table.make_room(9) is False
    assert len(table) == 0
    table.is_paused = True
    lease(table, cache, "a", [0, 1, 2])
    assert len(table) == 0


def test_random_leases_keep_the_sums() -> None:
    rng = random.Random(4)
    cache = PrefixCache(60, 1)
    table = LeaseTable(cache, 30)
    holders = "abcdefgh"
    known: list[list[int]] = [[0]]
    for _ in range(20_000):
        holder = rng.choice(holders)
        match rng.randrange(5):
            case 0:
                table.open(holder)
            case 1:
                table.close(holder)
            case 2:
                tokens = rng.choice(known)[: rng.randrange(12)] + [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
                if table.make_room(len(tokens)):
                    insert(cache, tokens)
                    known = [*known[-20:], tokens]
            case 3:
                lease(table, cache, holder, rng.choice(known))
            case 4:
                pages = cache.allocate(rng.randrange(1, 20))
                if pages is not None:
                    cache.free(pages)
        assert cache.num_available + table.num_pages >= cache.num_pages
        assert table.num_pages <= 30
        ends = list(table.nodes())
        assert all(node.num_locks for node in ends)
        cache.check_integrity([])
    for holder in holders:
        table.close(holder)
    assert cache.num_available == cache.num_pages
