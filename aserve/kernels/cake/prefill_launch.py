"""What can be chosen of the prefill kernel: how it is compiled."""

from dataclasses import dataclass

import torch

from aserve.kernels.cake.variant import Launch, least_block_len, row_width
from aserve.kernels.nvfp4 import element_bytes

OTHER_BYTES = 1 << 10  # for what warps tell each other: barriers, and parts of sums and maxima


@dataclass(frozen=True, slots=True)
class PrefillLaunch(Launch):
    """How a variant is compiled and launched."""

    tile_rows: int  # queries times heads of a group
    block_len: int  # keys
    num_warps: int
    num_stages: int

    def shared_bytes(self, head_dim: int, group: int, kv_bytes: float) -> int:
        """Return the shared memory that a program takes at most on any GPU, with queries in 16 bits."""
        queries, block = 2 * self.tile_rows * row_width(head_dim), self.block_len * row_width(head_dim)
        if kv_bytes == 2:
            return queries + self.num_stages * 4 * block + OTHER_BYTES
        copies = int(max(self.num_stages - 1, 1) * 2 * kv_bytes * block)
        factors = 4 * block  # keys and values, once converted, which only on Hopper take turns
        return queries + copies + factors + OTHER_BYTES


def plain_launch(dtype: torch.dtype, kv_dtype: torch.dtype) -> PrefillLaunch:
    """Return the one of small tiles, which fits any GPU."""
    block_len = least_block_len(dtype, element_bytes(kv_dtype))
    return PrefillLaunch(tile_rows=16, block_len=block_len, num_warps=4, num_stages=1)
