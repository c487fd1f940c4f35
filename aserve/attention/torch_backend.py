"""Attention over the paged pool in plain torch, on any device: the fallback, and the oracle of all others.

Decodes are grouped by similar key length, gathered with padding and computed as one batch; each
prefill chunk is computed alone, in blocks of queries. Scores and sums are float32. Gathers clamp to the
sequence's own last key, so nothing outside its keys is ever read, not even to be masked.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from aserve.attention.base import (
    PHASES,
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CaptureShape,
    LayerKV,
    LseBase,
    StepTables,
)
from aserve.attention.softmax import attend
from aserve.kernels.nvfp4 import dequantise

MAX_GROUP_KEYS = 65_536  # padded keys gathered at once for decodes
MAX_CAPTURED_KEYS = 1 << 18  # padded keys that a graph may gather: some GiB of float32
MAX_BLOCK_SCORES = 1 << 21  # scores held at once for a prefill chunk: 8 MiB


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar key length and their places ``rows`` among the batch's tokens."""

    rows: Tensor | slice
    page_table: Tensor  # [N, P] int32
    key_lens: Tensor  # [N] int32
    max_key_len: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The batch's tokens ``start .. stop - 1``: the last ones of a sequence with ``key_len`` keys."""

    start: int
    stop: int
    key_len: int
    page_table: Tensor  # [1, P] int32


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """What one step needs in every layer; ``key_rows`` is filled by the first layer and shared by the others.

    A captured plan holds one group, in buffers that stay in place, and computes its key rows anew.
    """

    groups: list[DecodeGroup]
    chunks: list[PrefillChunk]
    page_size: int
    tables: StepTables | None = None  # of a captured plan
    key_rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class TorchBackend(AttentionBackend):
    """Reads pools of any float dtype and of nvfp4, of any page size, group of heads and head size."""

    name = "torch"
    lse_base: LseBase = "e"

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        chunks = []
        start = batch.num_decodes
        for i in range(batch.num_decodes, len(batch.query_lens)):
            stop = start + batch.query_lens[i]
            chunks.append(PrefillChunk(start, stop, batch.key_lens[i], batch.page_table[i : i + 1]))
            start = stop
        return TorchPlan(_group_decodes(batch), chunks, batch.page_size)

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: TorchPlan,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        output = torch.empty_like(q) if out is None else out
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        for i, group in enumerate(plan.groups):
            key_rows = _group_key_rows(plan, i, spec.num_kv_heads)
            _attend_group(q, layer_kv, group, key_rows, spec, (output, lse))
        for i, chunk in enumerate(plan.chunks):
            key_rows = _chunk_key_rows(plan, i, spec.num_kv_heads)
            _attend_chunk(q, layer_kv, chunk, key_rows, spec, (output, lse))
        return output, lse

    @property
    def captures_decodes(self) -> bool:
        """Only if it serves both phases, and few and short sequences.

        All rows of a graph gather as many keys as there can be, in a pair's mixed steps those without a decode, too.
        """
        num_keys = self.problem.max_num_seqs * self.problem.max_model_len
        return self.phases == PHASES and num_keys <= MAX_CAPTURED_KEYS

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> TorchPlan:
        """Take a graph of decodes; it gathers as many keys of each as the page table is wide."""
        if shape.num_chunks:
            raise ValueError("only batches of decodes are captured")
        width = tables.page_table.shape[1]
        page_table = tables.page_table.new_zeros(shape.num_decodes, width)
        key_lens = tables.key_lens[: shape.num_decodes]
        group = DecodeGroup(slice(shape.num_decodes), page_table, key_lens, width * tables.page_size)
        return TorchPlan([group], [], tables.page_size, tables)

    def convert(self, plan: TorchPlan) -> None:
        if plan.tables is None:
            return
        page_table = plan.groups[0].page_table
        torch.index_select(plan.tables.page_table, 0, plan.tables.rows[: len(page_table)], out=page_table)


def _group_decodes(batch: AttentionBatch) -> list[DecodeGroup]:
    """Split the decodes so that padding to a group's longest adds at most about a quarter."""
    key_lens = batch.key_lens[: batch.num_decodes]
    spans: list[list[int]] = []
    for i in sorted(range(len(key_lens)), key=key_lens.__getitem__):
        is_near = spans and key_lens[i] <= key_lens[spans[-1][0]] * 5 // 4 + 64
        if is_near and key_lens[i] * (len(spans[-1]) + 1) <= MAX_GROUP_KEYS:
            spans[-1].append(i)
        else:
            spans.append([i])
    if len(spans) == 1:
        return [_decode_group(batch, slice(len(key_lens)), max(key_lens))]
    device = batch.page_table.device
    return [_decode_group(batch, torch.tensor(span, device=device), key_lens[span[-1]]) for span in spans]


def _decode_group(batch: AttentionBatch, rows: Tensor | slice, max_key_len: int) -> DecodeGroup:
    num_pages = -(-max_key_len // batch.page_size)
    return DecodeGroup(rows, batch.page_table[rows, :num_pages], batch.key_lens_device[rows], max_key_len)


def _group_key_rows(plan: TorchPlan, i: int, num_kv_heads: int) -> Tensor:
    group = plan.groups[i]
    if (key_rows := plan.key_rows.get((i, num_kv_heads))) is not None:
        return key_rows
    positions = torch.arange(group.max_key_len, device=group.key_lens.device)
    positions = torch.minimum(positions, group.key_lens.unsqueeze(1) - 1)  # [N, L]
    key_rows = _find_key_rows(group.page_table, positions, num_kv_heads, plan.page_size)
    if plan.tables is None:
        plan.key_rows[i, num_kv_heads] = key_rows
    return key_rows


def _chunk_key_rows(plan: TorchPlan, i: int, num_kv_heads: int) -> Tensor:
    chunk, key = plan.chunks[i], (len(plan.groups) + i, num_kv_heads)
    if key not in plan.key_rows:
        positions = torch.arange(chunk.key_len, device=chunk.page_table.device).unsqueeze(0)
        plan.key_rows[key] = _find_key_rows(chunk.page_table, positions, num_kv_heads, plan.page_size)
    return plan.key_rows[key]


def _find_key_rows(page_table: Tensor, positions: Tensor, num_kv_heads: int, page_size: int) -> Tensor:
    """Map ``positions`` [N, L] to rows [N, K, L] of a pool seen as [slots * K, D].

    One row for each head: gathered so, the keys of a head are contiguous, as the batched products want them.
    """
    slots = page_table.gather(1, positions // page_size).long() * page_size + positions % page_size
    heads = torch.arange(num_kv_heads, device=page_table.device)
    return slots.unsqueeze(1) * num_kv_heads + heads.view(-1, 1)


def _gather(pages: Tensor, key_rows: Tensor) -> Tensor:
    """Return ``key_rows`` [N, K, L] of ``pages`` [pages, page_size, K, W], [N, K, L, W]."""
    width = pages.shape[-1]
    rows = pages.view(-1, width)
    if pages.itemsize == 1:  # torch gathers no floats of 8 bits, but bytes
        gathered = rows.view(torch.uint8).index_select(0, key_rows.view(-1)).view(pages.dtype)
    else:
        gathered = rows.index_select(0, key_rows.view(-1))
    return gathered.view(*key_rows.shape, width)


def _read(pages: Tensor, block_scales: Tensor | None, scale: float | Tensor, key_rows: Tensor) -> Tensor:
    """Return the keys or values of ``key_rows`` [N, K, L], times ``scale``, as float32 [N, K, L, D]."""
    stored = _gather(pages, key_rows)
    values = stored.float() if block_scales is None else dequantise(stored, _gather(block_scales, key_rows))
    if isinstance(scale, Tensor):
        return values.mul_(scale.view(-1, 1, 1))
    return values if scale == 1.0 else values.mul_(scale)


def _gather_keys_and_values(layer_kv: LayerKV, key_rows: Tensor) -> tuple[Tensor, Tensor]:
    blocks = layer_kv.block_scales
    key_blocks, value_blocks = (None, None) if blocks is None else (blocks.key, blocks.value)
    keys = _read(layer_kv.key, key_blocks, layer_kv.key_scale, key_rows)
    return keys, _read(layer_kv.value, value_blocks, layer_kv.value_scale, key_rows)


def _attend_group(
    q: Tensor,
    layer_kv: LayerKV,
    group: DecodeGroup,
    key_rows: Tensor,
    spec: AttentionSpec,
    results: tuple[Tensor, Tensor | None],
) -> None:
    keys, values = _gather_keys_and_values(layer_kv, key_rows)
    positions = torch.arange(group.max_key_len, device=q.device)
    is_hidden = _hide(positions, group.key_lens.unsqueeze(1) - 1, spec.sliding_window).unsqueeze(1)  # [N, 1, L]
    queries = q[group.rows].float().unsqueeze(1)
    output, lse = attend(queries, keys, values, is_hidden, spec, return_lse=results[1] is not None)
    results[0][group.rows] = output[:, 0].to(q.dtype)
    if results[1] is not None and lse is not None:
        results[1][group.rows] = lse[:, 0]


def _attend_chunk(
    q: Tensor,
    layer_kv: LayerKV,
    chunk: PrefillChunk,
    key_rows: Tensor,
    spec: AttentionSpec,
    results: tuple[Tensor, Tensor | None],
) -> None:
    keys, values = _gather_keys_and_values(layer_kv, key_rows)
    window = spec.sliding_window
    block_len = max(16, MAX_BLOCK_SCORES // (spec.num_heads * chunk.key_len))
    for start in range(chunk.start, chunk.stop, block_len):
        stop = min(start + block_len, chunk.stop)
        # Queries stand at positions first .. high - 1 of their sequence; together they see keys low .. high - 1.
        first, high = chunk.key_len - (chunk.stop - start), chunk.key_len - (chunk.stop - stop)
        low = 0 if window is None else max(0, first - window + 1)
        query_positions = torch.arange(first, high, device=q.device).unsqueeze(1)
        is_hidden = _hide(torch.arange(low, high, device=q.device), query_positions, window).unsqueeze(0)  # [1, B, L]
        seen = slice(low, high)
        queries = q[start:stop].float().unsqueeze(0)
        output, lse = attend(
            queries, keys[:, :, seen], values[:, :, seen], is_hidden, spec, return_lse=results[1] is not None
        )
        results[0][start:stop] = output[0].to(q.dtype)
        if results[1] is not None and lse is not None:
            results[1][start:stop] = lse[0]


def _hide(key_positions: Tensor, query_positions: Tensor, window: int | None) -> Tensor:
    """Mark the keys after a query and, with a window, those that it no longer sees."""
    is_hidden = key_positions > query_positions
    return is_hidden if window is None else is_hidden | (key_positions <= query_positions - window)
