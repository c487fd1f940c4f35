"""The inputs of one padded step as arrays of one buffer: what the host fills is what one copy brings to the device.

Every entry that a replay reads is rewritten for every step, so nothing of an earlier, larger step is left.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.attention.base import CaptureShape, DecodeOrder, StepLens
from aserve.runner.cuda.sizes import MAX_CHUNKS
from aserve.runner.verification import sampled_places
from aserve.scheduler.plan import StepPlan

WORD = 4  # bytes; buffers are int32


@dataclass(frozen=True, slots=True)
class Fields:
    """One value for each array; ``S`` sequences (decodes, then chunks), ``N`` samples, all at capacity."""

    uniforms: Any  # [N] float64
    temperatures: Any  # [N] float32; 0 = greedy
    rows: Any  # [S + 1] int32; the last used entry is the padding's, as in the next two
    query_starts: Any  # [S + 1] int32
    query_lens: Any  # [S + 1] int32
    key_lens: Any  # [S + 1] int32
    cu_chunk_lens: Any  # [S + 1] int32: where each chunk starts; begins with the number of decodes
    sampled_tokens: Any  # [N] int32, among the step's tokens
    sampled_rows: Any  # [N] int32
    sampled_positions: Any  # [N] int32, of the new tokens


class ArrayLayout:
    """Where each array lies in a buffer of ``num_words`` int32."""

    def __init__(self, max_num_seqs: int, max_num_drafts: int = 0) -> None:
        self.max_num_seqs = max_num_seqs
        sampled, entries = max_num_seqs + max_num_drafts, max_num_seqs + MAX_CHUNKS + 1
        counts = (sampled, sampled, *[entries] * 5, *[sampled] * 3)
        self._places: list[tuple[int, int, Any, int]] = []  # first and last word, type, number of values
        place = 0
        for count, dtype in zip(counts, (np.float64, np.float32, *[np.int32] * 8), strict=True):
            size = -(-count * np.dtype(dtype).itemsize // (4 * WORD)) * 4  # arrays begin at multiples of 16 bytes
            self._places.append((place, place + size, dtype, count))
            place += size
        self.num_words = place

    def host_views(self, words: NDArray[np.int32]) -> Fields:
        """Return numpy views of ``words`` [at least num_words]."""
        return Fields(*(words[start:stop].view(dtype)[:count] for start, stop, dtype, count in self._places))

    def device_views(self, words: Tensor) -> Fields:
        """Return tensor views of ``words`` [at least num_words] int32."""
        dtypes = {np.float64: torch.float64, np.float32: torch.float32, np.int32: torch.int32}
        return Fields(*(words[start:stop].view(dtypes[dtype])[:count] for start, stop, dtype, count in self._places))


@dataclass(frozen=True, slots=True)
class StepRows:
    """Row and position of each sample of a step, in plan order, without padding."""

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]


class StepFiller:
    """Lays plans out for rows ``0 .. max_num_seqs - 1``, decodes in an order; the dummy row comes after these."""

    def __init__(self, max_num_seqs: int, decode_order: DecodeOrder = "longest first") -> None:
        self._decode_order = decode_order
        self._dummy_row = max_num_seqs
        self._counting = np.arange(max_num_seqs + 1, dtype=np.int32)

    def fill(self, arrays: Fields, plan: StepPlan, shape: CaptureShape, num_sampled: int) -> tuple[StepLens, StepRows]:
        """Write the sequences of ``plan``, padded to ``shape``, and what of them is sampled, padded to that number.

        How they are sampled is left to the caller, but for the padding.
        """
        num_decodes, num_seqs = plan.num_decodes, len(plan.rows)
        rows, key_lens = np.array(plan.rows, np.int32), np.array(plan.num_computed, np.int32)
        tokens = np.empty(num_seqs, np.int32)  # the last token of each sequence, in plan order
        key_lens[:num_decodes] += 1
        order = self._order(key_lens[:num_decodes])
        tokens[order] = self._counting[:num_decodes]
        self._fill_decodes(arrays, rows[order], key_lens[order], shape.num_decodes)
        places, num_behind = slice(0, num_decodes), 0  # type: Any, Any
        num_tokens = num_decodes
        if num_seqs > num_decodes or shape.num_chunks:
            lens = np.array(plan.num_scheduled[num_decodes:], np.int32)
            key_lens[num_decodes:] += lens
            ends = num_decodes + np.cumsum(lens, dtype=np.int32)
            tokens[num_decodes:] = ends - 1
            num_tokens = int(ends[-1]) if len(ends) else num_decodes
            self._fill_chunks(arrays, rows[num_decodes:], key_lens[num_decodes:], lens, ends, shape, num_decodes)
            places, num_behind = sampled_places(plan)
        arrays.cu_chunk_lens[0] = num_decodes
        end = shape.num_decodes + shape.num_chunks
        arrays.rows[end], arrays.query_starts[end] = self._dummy_row, num_tokens
        arrays.query_lens[end] = shape.num_tokens - num_tokens
        sampled = StepRows(rows[places].astype(np.int64), key_lens[places].astype(np.int64) - num_behind)
        self._fill_sampled(arrays, sampled, tokens[places] - num_behind, num_sampled)
        return StepLens(arrays.key_lens[:end], arrays.cu_chunk_lens[: shape.num_chunks + 1]), sampled

    def _order(self, key_lens: NDArray[np.int32]) -> NDArray[np.int64]:
        order = np.argsort(-key_lens, kind="stable")
        if self._decode_order == "longest first":
            return order
        mixed, num_long = np.empty_like(order), (len(order) + 1) // 2
        mixed[0::2], mixed[1::2] = order[:num_long], order[num_long:][::-1]
        return mixed

    def _fill_decodes(self, arrays: Fields, rows: NDArray[np.int32], key_lens: NDArray[np.int32], border: int) -> None:
        count = len(rows)
        arrays.rows[:count], arrays.rows[count:border] = rows, self._dummy_row
        arrays.query_starts[:count], arrays.query_starts[count:border] = self._counting[:count], count
        arrays.query_lens[:count], arrays.query_lens[count:border] = 1, 0
        arrays.key_lens[:count], arrays.key_lens[count:border] = key_lens, 1

    def _fill_chunks(
        self,
        arrays: Fields,
        rows: NDArray[np.int32],
        key_lens: NDArray[np.int32],
        lens: NDArray[np.int32],
        ends: NDArray[np.int32],
        shape: CaptureShape,
        num_decodes: int,
    ) -> None:
        count, num_tokens = len(rows), int(ends[-1]) if len(ends) else num_decodes
        place = slice(shape.num_decodes, shape.num_decodes + count)
        padding = slice(place.stop, shape.num_decodes + shape.num_chunks)
        arrays.rows[place], arrays.rows[padding] = rows, self._dummy_row
        arrays.query_starts[place], arrays.query_starts[padding] = ends - lens, num_tokens
        arrays.query_lens[place], arrays.query_lens[padding] = lens, 0
        arrays.key_lens[place], arrays.key_lens[padding] = key_lens, 0
        arrays.cu_chunk_lens[1 : count + 1], arrays.cu_chunk_lens[count + 1 : shape.num_chunks + 1] = ends, num_tokens

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
