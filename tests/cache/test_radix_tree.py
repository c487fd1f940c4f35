"""The radix tree against a plain dict of page prefixes (B21), and the corners that a random walk may miss."""

import random

import pytest

from aserve.cache.radix_tree import RadixTree, page_keys

Path = tuple[int, ...]  # one symbol for each page


class PrefixModel:
    """Every known prefix with its page, time and locks; nothing is compressed, so nothing can be split wrongly."""

    def __init__(self) -> None:
        self.pages: dict[Path, int] = {}
        self.times: dict[Path, int] = {}
        self.locks: dict[Path, int] = {}
        self.num_children: dict[Path, int] = {}
        self.clock = 0

    def match(self, path: Path) -> list[int]:
        self.clock += 1
        found = []
        for end in range(1, len(path) + 1):
            prefix = path[:end]
            if prefix not in self.pages:
                break
            self.times[prefix] = self.clock
            found.append(self.pages[prefix])
        return found

    def insert(self, path: Path, pages: list[int]) -> list[int]:
        for end in range(len(self.match(path)) + 1, len(path) + 1):
            prefix = path[:end]
            self.pages[prefix] = pages[end - 1]
            self.times[prefix] = self.clock
            self.locks[prefix] = self.num_children[prefix] = 0
            if end > 1:
                self.num_children[prefix[:-1]] += 1
        return [self.pages[path[:end]] for end in range(1, len(path) + 1)]

    def lock(self, path: Path, change: int) -> None:
        for end in range(1, len(path) + 1):
            self.locks[path[:end]] += change

    def evict(self, num_pages: int) -> list[int]:
        evicted = []
        while len(evicted) < num_pages:
            leaves = [path for path in self.pages if not self.locks[path] and not self.num_children[path]]
            if not leaves:
                break
            oldest = min(leaves, key=self.times.__getitem__)
            evicted.append(self.pages.pop(oldest))
            if len(oldest) > 1:
                self.num_children[oldest[:-1]] -= 1
        return evicted

    @property
    def num_locked(self) -> int:
        return sum(self.locks[path] > 0 for path in self.pages)


def tokens_of(path: Path, page_size: int) -> list[int]:
    """Return tokens of which each page differs from its siblings in the last token alone."""
    return [token for symbol in path for token in [7] * (page_size - 1) + [symbol]]


def run_random_operations(page_size: int, num_operations: int, seed: int) -> None:
    rng = random.Random(seed)
    tree, model = RadixTree(page_size), PrefixModel()
    held: list[tuple[object, Path]] = []
    free_pages = list(range(60))
    for number in range(num_operations):
        path = tuple(rng.randrange(3) for _ in range(rng.randint(0, 6)))
        tokens = tokens_of(path, page_size) + [9] * rng.randrange(page_size)
        choice = rng.random()
        if choice < 0.3:
            limit = rng.choice((None, rng.randint(0, 7 * page_size)))
            node, pages = tree.match(tokens, limit)
            seen = path if limit is None else path[: limit // page_size]
            assert pages == model.match(seen)
            if rng.random() < 0.3:
                tree.lock(node)
                model.lock(seen[: len(pages)], 1)
                held.append((node, seen[: len(pages)]))
        elif choice < 0.6 and len(free_pages) >= len(path):
            offered = free_pages[: len(path)]
            node, pages = tree.insert(tokens, offered)
            assert pages == model.insert(path, offered)
            kept = set(pages)
            free_pages = [page for page in free_pages if page not in kept]
            if rng.random() < 0.2:
                tree.lock(node)
                model.lock(path, 1)
                held.append((node, path))
        elif choice < 0.85 and held:
            node, locked = held.pop(rng.randrange(len(held)))
            tree.unlock(node)
            model.lock(locked, -1)
        else:
            num_pages = rng.choice((1, 1, 2, 5, 100))
            num_evictable = tree.num_evictable
            evicted = tree.evict(num_pages)
            assert evicted == model.evict(num_pages)  # the order, too
            assert len(evicted) == min(num_pages, num_evictable)
            free_pages += evicted
        assert tree.num_evictable + model.num_locked == len(model.pages)
        if number % 10 == 0:
            tree.check_integrity()
            assert sum(len(node.keys) for node in tree.nodes()) == len(model.pages)  # splits keep nothing twice
            assert len(tree._leaves) <= len(model.pages)
    for node, _ in held:
        tree.unlock(node)
    assert tree.num_evictable == len(model.pages)
    assert len(tree.evict(1000)) == len(model.pages)
    assert not tree.root.children
    assert not tree._leaves
    assert tree.num_nodes == 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_100_000_random_operations(page_size: int) -> None:
    run_random_operations(page_size, 100_000, seed=page_size)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("page_size", [1, 2, 256])
def test_more_random_operations(page_size: int, seed: int) -> None:
    run_random_operations(page_size, 100_000, seed=100 + seed)


def test_page_keys_hold_whole_pages_only() -> None:
    assert page_keys([1, 2, 3, 4, 5], 2, 9) == [(1, 2), (3, 4)]
    assert page_keys([1, 2, 3, 4, 5], 2, 1) == [(1, 2)]
    assert page_keys([1, 2, 3], 1, 2) == [1, 2]
    assert page_keys([1], 4, 3) == []


def test_a_lock_covers_the_node_itself_and_its_ancestors() -> None:
    tree = RadixTree(2)
    tree.insert([1, 2, 3, 4], [10, 11])
    node, pages = tree.match([1, 2, 3, 4])
    assert pages == [10, 11]
    tree.lock(node)
    tree.insert([1, 2, 5, 6], [10, 12])
    assert tree.evict(9) == [12]
    tree.unlock(node)
    assert tree.evict(9) == [11, 10]


def test_a_lock_survives_a_split_of_its_node() -> None:
    tree = RadixTree(1)
    node, _ = tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
    tree.lock(node)
    tree.match([1, 2])
    tree.insert([1, 2, 9], [0, 1, 4])
    assert (tree.num_evictable, tree.num_nodes) == (1, 3)
    tree.unlock(node)
    assert (tree.num_evictable, tree.num_nodes) == (5, 3)
    tree.check_integrity()


def test_a_split_refreshes_the_matched_part_only() -> None:
    tree = RadixTree(1)
    tree.insert([1, 2, 3], [0, 1, 2])
    tree.insert([7, 8], [3, 4])
    tree.match([1])  # page 0 is now the youngest, 1 and 2 stay the oldest
    assert tree.evict(5) == [2, 1, 4, 3, 0]


def test_a_match_never_exceeds_its_limit() -> None:
    tree = RadixTree(4)
    tree.insert(list(range(12)), [0, 1, 2])
    for limit, num_pages in ((0, 0), (3, 0), (4, 1), (11, 2), (12, 3), (99, 3)):
        assert len(tree.match(list(range(12)), limit)[1]) == num_pages
    tree.check_integrity()


def test_misuse_is_noticed() -> None:
    tree = RadixTree(4)
    with pytest.raises(AssertionError):
        tree.insert([1, 2, 3], [0])
    node, _ = tree.insert([1, 2, 3, 4], [0])
    with pytest.raises(AssertionError):
        tree.unlock(node)
    with pytest.raises(ValueError, match="page_size"):
        RadixTree(0)


class CountingToken(int):
    """A token that counts how often it is compared."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountingToken.num_comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_a_match_compares_each_page_a_few_times_only() -> None:
    tree = RadixTree(1)
    tokens = list(range(20_000))
    tree.insert(tokens, tokens)
    for end in range(100, 20_000, 100):  # leave a chain of 200 nodes
        tree.match(tokens[:end])
    assert sum(1 for _ in tree.nodes()) == 200
    CountingToken.num_comparisons = 0
    _, pages = tree.match([CountingToken(token) for token in tokens])
    assert pages == tokens
    assert CountingToken.num_comparisons <= 3 * len(tokens)
