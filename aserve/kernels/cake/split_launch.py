"""What can be chosen of the split decode kernel: how it is compiled, and how many of it run."""

from dataclasses import dataclass

from aserve.kernels.cake.architectures import RESERVED_BYTES
from aserve.kernels.cake.variant import Launch, row_width

MIN_UNITS = 2  # blocks that are worth a program of their own
MIN_TILE_ROWS, MIN_TILE_COLUMNS = 16, 8  # that a matrix product has at least
WARP_GROUP_ROWS, WARP_GROUP_WARPS = 64, 4  # from which on Hopper a warp group computes it together
MAX_APART_ROWS = 16  # of which a warp keeps whole sums
APART_WIDTHS = (64, 128)
WORDS_BYTES = 16  # that heads are whole multiples of where they are read as words
REGISTERS, MAX_REGISTERS = 1 << 16, 255  # of a multiprocessor, of a thread


@dataclass(frozen=True, slots=True)
class SplitLaunch(Launch):
    """How a variant is compiled and launched."""

    block_len: int  # keys of a unit of work
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_units: int = MIN_UNITS  # that are worth a program of their own

    @property
    def max_registers(self) -> int | None:
        """Return how many registers a thread may take for all programs to run at once, None if any number."""
        count = REGISTERS // (32 * self.num_warps * self.programs_per_sm) // 8 * 8
        return count if count < MAX_REGISTERS else None

    def is_apart(self, head_dim: int, num_rows: int, kv_bytes: float) -> bool:
        """Whether each warp attends to keys of its own, for ``num_rows`` queries times heads; see attend_apart.py."""
        least_len = self.num_warps * (16 if kv_bytes == 1 else 32)
        is_small = num_rows <= MAX_APART_ROWS and row_width(head_dim) in APART_WIDTHS
        are_words = kv_bytes < 1 or (kv_bytes == 1 and head_dim % WORDS_BYTES == 0)
        return are_words and is_small and self.block_len >= least_len

    def tile_rows(self, head_dim: int, num_rows: int, kv_bytes: float) -> int:
        """Return the rows of a program's tile; no less than a matrix product has, or its transpose has columns."""
        least = MIN_TILE_COLUMNS if self.is_apart(head_dim, num_rows, kv_bytes) else MIN_TILE_ROWS
        return max(least, 1 << (num_rows - 1).bit_length())

    def shared_bytes(self, head_dim: int, group: int, kv_bytes: float) -> int:
        """Return the shared memory that a program takes at most, with keys of ``kv_bytes`` an element."""
        tile, width = self.tile_rows(head_dim, group, kv_bytes), row_width(head_dim)
        block = self.block_len * width
        copies = int(max((self.num_stages - 1) // 2, 1) * 2 * block * kv_bytes)  # of keys and of values as many
        if self.is_apart(head_dim, group, kv_bytes):
            return copies + 8 * self.block_len
        queries = 2 * tile * width
        if tile >= WARP_GROUP_ROWS and self.num_warps >= WARP_GROUP_WARPS:
            operands = queries + 4 * block  # all of which products take from shared memory
        else:
            unpacked = 2 * block if kv_bytes <= 1 else 0  # values, as 16 bits
            operands = queries + 2 * tile * self.block_len + unpacked  # rearranged by way of shared memory
        return copies + operands + (16 if kv_bytes <= 1 else 8) * self.block_len + 512

    def count_programs(self, head_dim: int, num_rows: int, kv_bytes: float, given_bytes: int) -> int:
        """Return how many programs a multiprocessor gets: what the launch wants, as far as they run at once.

        ``num_rows`` are the queries times heads of a program, ``given_bytes`` the shared memory that one may have.
        Shares are equal, so a program that had to wait for another to end would double the time of all.
        """
        taken = self.shared_bytes(head_dim, num_rows, kv_bytes) + RESERVED_BYTES
        count = min(self.programs_per_sm, (given_bytes + RESERVED_BYTES) // taken)
        if kv_bytes <= 1 and not self.is_apart(head_dim, num_rows, kv_bytes):  # unpacking takes all registers there are
            count = min(count, REGISTERS // (32 * self.num_warps * (MAX_REGISTERS + 1)))
        return max(count, 1)
