"""Random numbers that depend on (seed, position) alone: a counter-based hash, computed on the host for any device."""

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def draw_uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each pair, on a grid of 2^-53.

    Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014): one spreads the seed, one the position.
    """
    state = _mix(seeds + GOLDEN) + positions.astype(np.uint64) * GOLDEN
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
