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
    """Lays plans out for rows ``0 .. max_num_seqs - 1``; the dummy row comes after these."""

    def __init__(self, max_num_seqs: int) -> None:
        self._dummy_row = max_num_seqs

    def fill(self, arrays: Fields, plan: StepPlan, shape: CaptureShape) -> StepLens:
        """Write the sequences of ``plan``, padded to ``shape``; everything but the sampled rows."""
        num_decodes, num_seqs = plan.num_decodes, len(plan.rows)
        rows = np.array(plan.rows, np.int32)
        lens = np.array(plan.num_scheduled, np.int32)
        ends = np.cumsum(lens, dtype=np.int32)
        num_tokens = int(lens.sum())
        border, end = shape.num_decodes, shape.num_decodes + shape.num_chunks
        sections = (slice(0, num_decodes), slice(num_decodes, num_seqs))
        pads = (slice(num_decodes, border), slice(border + num_seqs - num_decodes, end))
        places = (slice(0, num_decodes), slice(border, border + num_seqs - num_decodes))
        key_lens = np.array(plan.num_computed, np.int32) + lens
        for section, place, pad, start, padding_key_len in zip(
            sections, places, pads, (num_decodes, num_tokens), (1, 0), strict=True
        ):
            arrays.rows[place], arrays.rows[pad] = rows[section], self._dummy_row
            arrays.query_lens[place], arrays.query_lens[pad] = lens[section], 0
            arrays.query_starts[place], arrays.query_starts[pad] = (ends - lens)[section], start
            arrays.key_lens[place], arrays.key_lens[pad] = key_lens[section], padding_key_len
        arrays.rows[end] = self._dummy_row
        arrays.query_starts[end], arrays.query_lens[end] = num_tokens, shape.num_tokens - num_tokens
        cu_chunk_lens = arrays.cu_chunk_lens[: shape.num_chunks + 1]
        cu_chunk_lens[0] = num_decodes
        cu_chunk_lens[1 : num_seqs - num_decodes + 1] = ends[num_decodes:]
        cu_chunk_lens[num_seqs - num_decodes + 1 :] = num_tokens
        return StepLens(arrays.key_lens[:end], cu_chunk_lens)

    def fill_sampled(self, arrays: Fields, plan: StepPlan, size: int) -> StepRows:
        """Write which rows are sampled, padded to ``size``; the caller writes how."""
        lens = np.array(plan.num_scheduled, np.int64)
        ends = np.cumsum(lens)
        places = np.flatnonzero(plan.is_sampled)
        count = len(places)
        rows = np.array(plan.rows, np.int64)[places]
        positions = (np.array(plan.num_computed, np.int64) + lens)[places]
        for array, values, padding in (
            (arrays.sampled_tokens, ends[places] - 1, 0),
            (arrays.sampled_rows, rows, self._dummy_row),
            (arrays.sampled_positions, positions, 0),
        ):
            array[:count], array[count:size] = values, padding
        arrays.temperatures[count:size] = 0.0
        arrays.uniforms[count:size] = 0.0
        return StepRows(rows, positions)
