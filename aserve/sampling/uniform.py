"""Random numbers that depend on (seed, position) alone: a counter-based hash, computed on the host for any device."""

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def draw_uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each pair, on a grid of 2^-53.

    Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014): one spreads the seed, one the position.
    """
    return advance(spread_seeds(seeds), positions)


def spread_seeds(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the first round, which a row needs once."""
    return _mix(seeds + GOLDEN)


def advance(
    states: NDArray[np.uint64], positions: NDArray[np.int64], out: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return the second round, over what ``spread_seeds`` returned."""
    mixed = _mix(states + positions.astype(np.uint64) * GOLDEN)
    numbers = np.empty(mixed.shape) if out is None else out
    np.multiply(mixed >> np.uint64(11), 2.0**-53, out=numbers)
    return numbers


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
