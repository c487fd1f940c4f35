"""From a StepPlan to the host arrays that a step uploads; pure, vectorised, no torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aserve.scheduler.plan import StepPlan

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views into the buffers of one step: S sequences, T tokens, N sampled rows."""

    is_fresh: bool  # no row has keys from earlier steps
    rows: IntArray  # [S] int64, of page table and token pool
    query_lens: IntArray  # [S] int32
    key_lens: IntArray  # [S] int32
    cu_query_lens: IntArray  # [S + 1] int32
    cu_key_lens: IntArray  # [S + 1] int32
    token_rows: IntArray  # [T] int64, the row of each token
    positions: IntArray  # [T] int64
    sampled_seqs: IntArray  # [N] int64, places in the plan
    sampled_tokens: IntArray  # [N] int64, the last token of each sampled row, among the T

    @property
    def max_key_len(self) -> int:
        """Longest key of the step; every step has at least one row."""
        return int(self.key_lens.max())


class InputBuffers:
    """Host memory for the inputs of one step at a time; whoever reads the views is done before the next ``fill``."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int) -> None:
        self._rows = np.zeros(max_num_seqs, np.int64)
        self._query_lens = np.zeros(max_num_seqs, np.int32)
        self._key_lens = np.zeros(max_num_seqs, np.int32)
        self._cu_query_lens = np.zeros(max_num_seqs + 1, np.int32)
        self._cu_key_lens = np.zeros(max_num_seqs + 1, np.int32)
        self._token_rows = np.zeros(max_num_tokens, np.int64)
        self._positions = np.zeros(max_num_tokens, np.int64)
        self._steps = np.arange(max_num_tokens, dtype=np.int64)

    def fill(self, plan: StepPlan) -> StepInputs:
        """Lay out ``plan``."""
        n, num_tokens = len(plan.rows), plan.num_tokens
        computed = np.array(plan.num_computed, np.int64)
        self._fill_seqs(plan, computed, n)
        self._fill_tokens(computed, n, num_tokens)
        sampled_seqs = np.flatnonzero(np.array(plan.is_sampled, bool))
        return StepInputs(
            is_fresh=not computed.any(),
            rows=self._rows[:n],
            query_lens=self._query_lens[:n],
            key_lens=self._key_lens[:n],
            cu_query_lens=self._cu_query_lens[: n + 1],
            cu_key_lens=self._cu_key_lens[: n + 1],
            token_rows=self._token_rows[:num_tokens],
            positions=self._positions[:num_tokens],
            sampled_seqs=sampled_seqs,
            sampled_tokens=self._cu_query_lens[sampled_seqs + 1].astype(np.int64) - 1,
        )

    def _fill_seqs(self, plan: StepPlan, computed: NDArray[np.int64], n: int) -> None:
        self._rows[:n] = plan.rows
        self._query_lens[:n] = plan.num_scheduled
        self._key_lens[:n] = computed + self._query_lens[:n]
        np.cumsum(self._query_lens[:n], out=self._cu_query_lens[1 : n + 1])
        np.cumsum(self._key_lens[:n], out=self._cu_key_lens[1 : n + 1])

    def _fill_tokens(self, computed: NDArray[np.int64], n: int, num_tokens: int) -> None:
        query_lens = self._query_lens[:n]
        self._token_rows[:num_tokens] = np.repeat(self._rows[:n], query_lens)
        first_tokens = self._cu_query_lens[:n] - computed  # where position 0 of each row would stand
        self._positions[:num_tokens] = self._steps[:num_tokens] - np.repeat(first_tokens, query_lens)
