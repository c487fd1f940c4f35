"""Chooses tokens on a GPU: launches alone, no wait for the device and no allocation, so a CUDA graph can hold them."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from aserve.sampling.gpu import pick_kernels
from aserve.sampling.gpu.pick_kernels import BLOCK

NUM_WARPS = 4


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
        from call to call without compiling anything; dtype and strides of the logits may not.
        """
        row_stride = self._check(logits)
        self._sum_blocks(logits, temperatures, row_stride)
        self._pick(logits, uniforms, temperatures, token_ids, target, row_stride)

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

    def _pick(
        self,
        logits: Tensor,
        uniforms: Tensor,
        temperatures: Tensor,
        token_ids: Tensor,
        target: PoolTarget | None,
        row_stride: int,
    ) -> None:
        pool = target or PoolTarget(token_ids, token_ids, token_ids)  # not read without HAS_POOL
        pick_kernels.pick_tokens[(len(logits),)](
            logits,
            temperatures,
            uniforms,
            temperatures,
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
            HAS_LIMITS=False,
            HAS_POOL=target is not None,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
