"""What can be chosen of the split decode kernel: how it is compiled, and how many of it run."""

from dataclasses import dataclass

from aserve.kernels.cake.variant import Launch, row_width

MIN_UNITS = 2  # blocks that are worth a program of their own
MIN_TILE_ROWS = 16  # rows that a matrix product has at least
WARP_GROUP_ROWS = 64  # from which on Hopper a warp group computes it together


@dataclass(frozen=True, slots=True)
class SplitLaunch(Launch):
    """How a variant is compiled and launched."""

    block_len: int  # keys of a unit of work
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_units: int = MIN_UNITS  # that are worth a program of their own

    def shared_bytes(self, head_dim: int, group: int, kv_bytes: float) -> int:
        """Return the shared memory that a program takes at most, with keys of ``kv_bytes`` an element."""
        tile, width = tile_rows(group), row_width(head_dim)
        block = self.block_len * width
        copies = int(max(self.num_stages - 1, 2) * block * kv_bytes)  # of keys and values in turn
        unpacked = 2 * block if kv_bytes <= 1 else 0  # values, as 16 bits
        # Operands are rearranged by way of shared memory; products of a warp group also take theirs from there.
        operands = tile * (width + self.block_len) * (4 if tile >= WARP_GROUP_ROWS else 2)
        return copies + unpacked + operands + 8 * self.block_len + 512


def tile_rows(count: int) -> int:
    """Return the rows of a tile for ``count`` queries times heads."""
    return max(MIN_TILE_ROWS, 1 << (count - 1).bit_length())
