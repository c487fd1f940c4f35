"""Chooses tokens on a GPU: launches alone, no wait for the device and no allocation, so a CUDA graph can hold them."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from aserve.sampling.draw import FilterValues
from aserve.sampling.gpu import limit_kernel, pick_kernels
from aserve.sampling.gpu.pick_kernels import BLOCK

NUM_WARPS = 4
NUM_SEARCH_WARPS = 8


class PoolTarget(NamedTuple):
    """Where chosen ids are kept for the next step: ``pool[rows[i], positions[i]]``."""

    pool: Tensor  # [R, P] int32
    rows: Tensor  # [N] int32
    positions: Tensor  # [N] int32


class TokenPicker:
    """Owns the work space of up to ``max_rows`` rows; calls on one stream, one after the other, share it."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._num_blocks = triton.cdiv(vocab_size, BLOCK)
        self._maxima = torch.empty((max_rows, self._num_blocks), dtype=torch.float32, device=device)
        self._sums = torch.empty_like(self._maxima)
        self._bests = torch.empty(max_rows, dtype=torch.float32, device=device)
        self._limits = torch.empty_like(self._bests)
        self._candidates = torch.empty((max_rows, limit_kernel.CAPACITY), dtype=torch.float32, device=device)

    def pick_plain(
        self,
        logits: Tensor,
        uniforms: Tensor,
        temperatures: Tensor,
        token_ids: Tensor,
        target: PoolTarget | None = None,
    ) -> None:
        """Write one id for each row of ``logits`` [N, V] (any float dtype, not changed) to ``token_ids`` [N] int32.

        ``uniforms`` [N] float64 in [0, 1); ``temperatures`` [N] float32, 0 for the most likely token (the lowest id of
        equals). A row whose logits are not finite gets -1, and 0 in the pool, which is safe to embed. N may change
        from call to call without compiling anything; dtype and strides of the logits, and whether there is a
        target, may not.
        """
        row_stride = self._check(logits)
        self._sum_blocks(logits, temperatures, row_stride)
        self._pick(logits, uniforms, temperatures, token_ids, False, target, row_stride)

    def pick_filtered(
        self,
        logits: Tensor,
        uniforms: Tensor,
        temperatures: Tensor,
        filters: FilterValues,
        token_ids: Tensor,
        target: PoolTarget | None = None,
    ) -> None:
        """Do the same where ``filters``, as in ``draw_tokens``, leave only some tokens to draw from.

        They change nothing for a row of temperature 0.
        """
        row_stride = self._check(logits)
        self._sum_blocks(logits, temperatures, row_stride)
        self._find_limits(logits, temperatures, filters, row_stride)
        self._sum_kept(logits, temperatures, row_stride)
        self._pick(logits, uniforms, temperatures, token_ids, True, target, row_stride)

    def find_limits(self, logits: Tensor, temperatures: Tensor, filters: FilterValues) -> Tensor:
        """Return [N] float32: the smallest logit that passes, less the best one and scaled; -inf for greedy rows."""
        row_stride = self._check(logits)
        self._sum_blocks(logits, temperatures, row_stride)
        self._find_limits(logits, temperatures, filters, row_stride)
        return self._limits[: len(logits)].clone()

    def warm_up(self, logits: Tensor) -> None:
        """Compile and load the kernels for ``logits`` [N, V] like these, but for those that write to a pool."""
        num_rows, device = len(logits), logits.device
        ones = torch.ones(num_rows, dtype=torch.float32, device=device)
        uniforms = torch.zeros(num_rows, dtype=torch.float64, device=device)
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
        self.pick_plain(logits, uniforms, ones, token_ids)
        self.pick_filtered(logits, uniforms, ones, FilterValues(ones, ones, ones), token_ids)

    def _check(self, logits: Tensor) -> int:
        num_rows, vocab_size = logits.shape
        if num_rows > self._max_rows or vocab_size != self._vocab_size or logits.stride(1) != 1:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} and strides {logits.stride()} do not fit a picker for "
                f"{self._max_rows} rows of {self._vocab_size}"
            )
        return logits.stride(0)

    def _sum_blocks(self, logits: Tensor, temperatures: Tensor, row_stride: int) -> None:
        pick_kernels.sum_blocks[(self._num_blocks, len(logits))](
            logits,
            temperatures,
            self._maxima,
            self._sums,
            VOCAB_SIZE=self._vocab_size,
            ROW_STRIDE=row_stride,
            NUM_BLOCKS=self._num_blocks,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )

    def _find_limits(self, logits: Tensor, temperatures: Tensor, filters: FilterValues, row_stride: int) -> None:
        limit_kernel.find_limits[(len(logits),)](
            logits,
            temperatures,
            *filters,
            self._maxima,
            self._sums,
            self._candidates,
            self._bests,
            self._limits,
            VOCAB_SIZE=self._vocab_size,
            ROW_STRIDE=row_stride,
            NUM_BLOCKS=self._num_blocks,
            NUM_BLOCKS_PADDED=triton.next_power_of_2(self._num_blocks),
            TILE=limit_kernel.TILE,
            NARROW_TILE=limit_kernel.NARROW_TILE,
            CAPACITY=limit_kernel.CAPACITY,
            num_warps=NUM_SEARCH_WARPS,
        )

    def _sum_kept(self, logits: Tensor, temperatures: Tensor, row_stride: int) -> None:
        pick_kernels.sum_kept[(self._num_blocks, len(logits))](
            logits,
            temperatures,
            self._bests,
            self._limits,
            self._maxima,
            self._sums,
            VOCAB_SIZE=self._vocab_size,
            ROW_STRIDE=row_stride,
            NUM_BLOCKS=self._num_blocks,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )

    def _pick(
        self,
        logits: Tensor,
        uniforms: Tensor,
        temperatures: Tensor,
        token_ids: Tensor,
        has_limits: bool,
        target: PoolTarget | None,
        row_stride: int,
    ) -> None:
        pool = target or PoolTarget(token_ids, token_ids, token_ids)  # not read without HAS_POOL
        pick_kernels.pick_tokens[(len(logits),)](
            logits,
            temperatures,
            uniforms,
            self._limits,
            self._maxima,
            self._sums,
            token_ids,
            pool.rows,
            pool.positions,
            pool.pool,
            pool.pool.stride(0),
            VOCAB_SIZE=self._vocab_size,
            ROW_STRIDE=row_stride,
            NUM_BLOCKS=self._num_blocks,
            NUM_BLOCKS_PADDED=triton.next_power_of_2(self._num_blocks),
            HAS_LIMITS=has_limits,
            HAS_POOL=target is not None,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
