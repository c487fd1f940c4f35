"""What the tables of variants have in common: one row for each kernel and what it is compiled for."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from aserve.kernels.cake.attention_call import AttentionCall

UNBOUNDED = 2**31 - 1  # keys or sequences: more than there are
MIN_WIDTH = 16  # elements of a head that a matrix product has at least


@dataclass(frozen=True, slots=True)
class Launch(ABC):
    """How a variant is compiled and launched: positive integers, which may be measured for each GPU."""

    @abstractmethod
    def shared_bytes(self, head_dim: int, group: int, kv_bytes: float) -> int:
        """Return the shared memory that a program takes at most, with keys of ``kv_bytes`` an element."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One row: what it serves. All that is not said here is a constant or an argument of its kernel.

    An exact row, which serves only some steps or lengths, stands before the generic one of its dtypes and head size.
    """

    name: str  # unique in its table
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]  # of queries and of keys and values
    head_dims: range | tuple[int, ...]
    max_group: int  # query heads of a KV head, for each query of a sequence where there are several
    launch: Launch | None  # where no file has another for the GPU; None if there is nothing to choose
    writes_lse: bool = True  # of the calls that want it
    max_keys: int | None = None  # that a query sees: of its window, or as many as a sequence may have
    max_seqs: int | None = None  # of a step

    @property
    def is_exact(self) -> bool:
        """Whether it serves some steps or lengths only."""
        return self.max_keys is not None or self.max_seqs is not None

    def check(self, call: AttentionCall) -> None:
        """Raise ValueError if ``call`` wants what the row does not write; the selector was not told of it then."""
        if call.lse is not None and not self.writes_lse:
            raise ValueError(f"return_lse: {self.name} leaves no log-sum-exp, and the problem does not say needs_lse")


def row_width(head_dim: int) -> int:
    """Return the elements that a kernel gives to a head, which are masked past ``head_dim``."""
    return max(MIN_WIDTH, 1 << (head_dim - 1).bit_length())


def least_block_len(dtype: torch.dtype, kv_bytes: float) -> int:
    """Return how many keys of ``kv_bytes`` an element a product with queries in ``dtype`` has at least.

    Of keys in 4 bits Triton gives 8 to each of four lanes of a warp for 16-bit factors; where there are fewer, some
    count twice and some not at all.
    """
    return 32 if kv_bytes < 1 and dtype.itemsize == 2 else 16


def check_block_len(block_len: int, dtype: torch.dtype, kv_bytes: float) -> None:
    """Raise ValueError for fewer keys than that."""
    least = least_block_len(dtype, kv_bytes)
    if block_len < least:
        raise ValueError(f"block_len: must be {least} or more on such keys, not {block_len}")
