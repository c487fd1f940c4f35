"""Which tokens of a sequence a rank keeps when the KV of each sequence is spread over several."""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Lens = TypeVar("Lens", int, NDArray[np.integer[Any]], Tensor)


@dataclass(frozen=True, slots=True)
class ContextShard:
    """The tokens at positions ``rank``, ``rank + size``, ``rank + 2 * size`` and so on; alone, a rank keeps all.

    A page of the scheduler has a place for ``size`` times as many tokens as the page of the same number in the pool of
    each rank: the token at position p is the (p // size)th of those that its rank keeps.
    """

    rank: int = 0
    size: int = 1

    def count(self, lens: Lens) -> Lens:
        """Return how many of the first ``lens`` tokens of a sequence the rank keeps."""
        return (lens + (self.size - 1 - self.rank)) // self.size

    def slots(self, pages: Tensor, positions: Tensor, page_size: int, dummy_page: int) -> Tensor:
        """Return where in the pool the tokens at ``positions`` [T] on ``pages`` [T] of the scheduler go.

        ``page_size`` is the scheduler's. The tokens of other ranks go to ``dummy_page``, which nobody reads.
        """
        own_size = page_size // self.size
        own = pages * own_size + positions // self.size % own_size
        return own.where(positions % self.size == self.rank, dummy_page * own_size)


ALONE = ContextShard()
