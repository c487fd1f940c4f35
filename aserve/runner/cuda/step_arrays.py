"""The inputs of one padded step as arrays of one buffer: what the host fills is what one copy brings to the device.

Every entry that a replay reads is rewritten for every step, so nothing of an earlier, larger step is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.attention.base import CaptureShape, StepLens
from aserve.runner.cuda.sizes import MAX_CHUNKS
from aserve.scheduler.plan import StepPlan

WORD = 4  # bytes; buffers are int32


@dataclass(frozen=True, slots=True)
class Fields:
    """One value for each array; ``S`` sequences (decodes, then chunks), ``N`` sampled rows, all at capacity."""

    uniforms: Any  # [N] float64
    temperatures: Any  # [N] float32; 0 = greedy
    rows: Any  # [S + 1] int32; the last used entry is the padding's, as in the next two
    query_starts: Any  # [S + 1] int32
    query_lens: Any  # [S + 1] int32
    key_lens: Any  # [S] int32
    cu_chunk_lens: Any  # [S + 1] int32: where each chunk starts; begins with the number of decodes
    sampled_tokens: Any  # [N] int32, among the step's tokens
    sampled_rows: Any  # [N] int32
    sampled_positions: Any  # [N] int32, of the new tokens


class ArrayLayout:
    """Where each array lies in a buffer of ``num_words`` int32."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_sampled = max_num_seqs
        self.max_num_entries = max_num_seqs + MAX_CHUNKS + 1
        sampled, entries = self.max_num_sampled, self.max_num_entries
        self._counts = Fields(sampled, sampled, entries, entries, entries, entries, entries, sampled, sampled, sampled)
        self._dtypes = Fields(np.float64, np.float32, *[np.int32] * 8)
        sizes = [
            -(-getattr(self._counts, name) * np.dtype(getattr(self._dtypes, name)).itemsize // (4 * WORD)) * 4
            for name in Fields.__slots__
        ]
        self._bounds = list(pairwise(np.cumsum([0, *sizes]).tolist()))
        self.num_words: int = self._bounds[-1][1]

    def host_views(self, words: NDArray[np.int32]) -> Fields:
        """Return numpy views of ``words`` [at least num_words]."""
        return Fields(
            *(
                words[start:stop].view(dtype)[:count]
                for (start, stop), dtype, count in zip(self._bounds, *self._columns(), strict=True)
            )
        )

    def device_views(self, words: Tensor) -> Fields:
        """Return tensor views of ``words`` [at least num_words] int32."""
        dtypes = {np.float64: torch.float64, np.float32: torch.float32, np.int32: torch.int32}
        return Fields(
            *(
                words[start:stop].view(dtypes[dtype])[:count]
                for (start, stop), dtype, count in zip(self._bounds, *self._columns(), strict=True)
            )
        )

    def _columns(self) -> Iterator[list[Any]]:
        for fields in (self._dtypes, self._counts):
            yield [getattr(fields, name) for name in Fields.__slots__]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The sampled rows of a step, in plan order, without padding."""

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]


class StepFiller:
    """Lays plans out for rows ``0 .. max_num_seqs - 1``; the dummy row comes after these.

    Decodes stand in the order of their keys, most first: thread blocks start in order, and the last to start should be
    the quickest to end.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._dummy_row = max_num_seqs

    def fill(self, arrays: Fields, plan: StepPlan, shape: CaptureShape, num_sampled: int) -> tuple[StepLens, StepRows]:
        """Write the sequences of ``plan``, padded to ``shape``, and which of them are sampled, padded to that number.

        How they are sampled is left to the caller, but for the padding.
        """
        num_decodes = plan.num_decodes
        rows, lens = np.array(plan.rows, np.int32), np.array(plan.num_scheduled, np.int32)
        key_lens = np.array(plan.num_computed, np.int32) + lens
        order = np.arange(len(rows))
        order[:num_decodes] = np.argsort(-key_lens[:num_decodes], kind="stable")
        tokens = np.empty(len(rows), np.int32)  # the last token of each sequence, in plan order
        tokens[order] = np.cumsum(lens[order]) - 1
        step_lens = self._fill_sequences(arrays, shape, num_decodes, rows[order], lens[order], key_lens[order])
        places = np.flatnonzero(plan.is_sampled)
        sampled = StepRows(rows[places].astype(np.int64), key_lens[places].astype(np.int64))
        self._fill_sampled(arrays, sampled, tokens[places], num_sampled)
        return step_lens, sampled

    def _fill_sequences(
        self,
        arrays: Fields,
        shape: CaptureShape,
        num_decodes: int,
        rows: NDArray[np.int32],
        lens: NDArray[np.int32],
        key_lens: NDArray[np.int32],
    ) -> StepLens:
        num_chunks, ends = len(rows) - num_decodes, np.cumsum(lens, dtype=np.int32)
        num_tokens = int(lens.sum())
        border, end = shape.num_decodes, shape.num_decodes + shape.num_chunks
        for section, first, stop, padding_start, padding_key_len in (
            (slice(0, num_decodes), 0, border, num_decodes, 1),
            (slice(num_decodes, None), border, end, num_tokens, 0),
        ):
            used = first + len(rows[section])
            place, padding = slice(first, used), slice(used, stop)
            arrays.rows[place], arrays.rows[padding] = rows[section], self._dummy_row
            arrays.query_lens[place], arrays.query_lens[padding] = lens[section], 0
            arrays.query_starts[place], arrays.query_starts[padding] = (ends - lens)[section], padding_start
            arrays.key_lens[place], arrays.key_lens[padding] = key_lens[section], padding_key_len
        arrays.rows[end] = self._dummy_row
        arrays.query_starts[end], arrays.query_lens[end] = num_tokens, shape.num_tokens - num_tokens
        cu_chunk_lens = arrays.cu_chunk_lens[: shape.num_chunks + 1]
        cu_chunk_lens[0] = num_decodes
        cu_chunk_lens[1 : num_chunks + 1], cu_chunk_lens[num_chunks + 1 :] = ends[num_decodes:], num_tokens
        return StepLens(arrays.key_lens[:end], cu_chunk_lens)

    def _fill_sampled(self, arrays: Fields, sampled: StepRows, tokens: NDArray[np.int32], size: int) -> None:
        count = len(tokens)
        for array, values, padding in (
            (arrays.sampled_tokens, tokens, 0),
            (arrays.sampled_rows, sampled.rows, self._dummy_row),
            (arrays.sampled_positions, sampled.positions, 0),
        ):
            array[:count], array[count:size] = values, padding
        arrays.temperatures[count:size] = 0.0
        arrays.uniforms[count:size] = 0.0
