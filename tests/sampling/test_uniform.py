"""The hash behind seeds."""

import numpy as np

from aserve.sampling.uniform import _mix, draw_uniforms


def scalar_mix(state: int) -> int:
    """SplitMix64's finaliser in Python integers."""
    mask = 2**64 - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return state ^ (state >> 31)


def test_the_finaliser_gives_the_published_first_numbers() -> None:
    """SplitMix64 from state 0 starts with these outputs, as in its authors' test vectors."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([golden, 2 * golden % 2**64], np.uint64)
    assert [int(value) for value in _mix(states)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert [scalar_mix(int(state)) for state in states] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_numbers_depend_on_seed_and_position_alone() -> None:
    seeds = np.array([0, 1, 42, 2**63 - 1, 2**64 - 1], np.uint64)
    positions = np.arange(100, dtype=np.int64)
    table = draw_uniforms(np.repeat(seeds, 100), np.tile(positions, 5)).reshape(5, 100)
    assert len(np.unique(table)) == 500
    for i, seed in enumerate(seeds):
        for position in (0, 17, 99):
            alone = draw_uniforms(np.array([seed]), np.array([position]))
            assert alone[0] == table[i, position]


def test_numbers_are_uniform_along_positions_and_along_seeds() -> None:
    count = 100_000
    for seeds, positions in (
        (np.full(count, 7, np.uint64), np.arange(count)),
        (np.arange(count).astype(np.uint64), np.full(count, 3)),
    ):
        numbers = draw_uniforms(seeds, positions)
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.bincount((numbers * 100).astype(int), minlength=100)
        assert ((counts - 1000) ** 2 / 1000).sum() < 148.2  # 99.9 % quantile of chi-square, 99 degrees
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.011  # 3.5 sigma


def test_related_seeds_do_not_follow_each_other() -> None:
    """A seed that differs by the step between positions must not give the same numbers one position later."""
    golden = 0x9E3779B97F4A7C15
    positions = np.arange(50, dtype=np.int64)
    numbers = [draw_uniforms(np.full(50, seed, np.uint64), positions) for seed in (3, 3 + golden, (3 - golden) % 2**64)]
    assert len(np.unique(np.concatenate(numbers))) == 150
