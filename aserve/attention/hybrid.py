"""Two backends as one: one for prefill chunks, one for decodes, each planning its own slice of a step."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aserve.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CaptureShape,
    LayerKV,
    LseBase,
    StepLens,
    StepTables,
)
from aserve.attention.merge import convert_lse
from aserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """The plans of both slices, None for an empty one.

    In a captured plan the chunks' first token changes from step to step, so that part gets all tokens, and
    ``num_decode_tokens`` says on the device where they begin.
    """

    num_decodes: int
    decode: Any
    prefill: Any
    first_chunk_token: int
    num_decode_tokens: Tensor | None = None  # [1] int32


class HybridBackend(AttentionBackend):
    """LSEs leave in base e, whatever the two speak."""

    lse_base: LseBase = "e"

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        """Raise ConfigError if the two cannot read one pool."""
        self.name = f"{prefill.name},{decode.name}"
        if prefill.kv_order != decode.kv_order and not (prefill.reads_any_order or decode.reads_any_order):
            raise ConfigError(
                f"attention backends {self.name!r} cannot share a pool: "
                f"{prefill.name} wants pages in {prefill.kv_order} order, {decode.name} in {decode.kv_order}"
            )
        super().__init__(decode.problem, decode.device)
        self.kv_order = prefill.kv_order if decode.reads_any_order else decode.kv_order
        self.decode_order = decode.decode_order
        self.offset_bits = min(prefill.offset_bits, decode.offset_bits)
        self._prefill = prefill
        self._decode = decode

    def plan(self, batch: AttentionBatch) -> HybridPlan:
        num_decodes, num_seqs = batch.num_decodes, len(batch.key_lens)
        if num_decodes == num_seqs:
            return HybridPlan(num_decodes, self._decode.plan(batch), None, num_decodes)
        if num_decodes == 0:
            return HybridPlan(0, None, self._prefill.plan(batch), 0)
        decode = self._decode.plan(slice_batch(batch, 0, num_decodes))
        prefill = self._prefill.plan(slice_batch(batch, num_decodes, num_seqs))
        return HybridPlan(num_decodes, decode, prefill, num_decodes)

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: HybridPlan,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        out = torch.empty_like(q) if out is None else out
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        for backend, part, section in (
            (self._decode, plan.decode, slice(0, plan.num_decodes)),
            (self._prefill, plan.prefill, slice(plan.first_chunk_token, None)),
        ):
            if part is None:
                continue
            _, part_lse = backend.forward(q[section], layer_kv, part, spec, return_lse=return_lse, out=out[section])
            if lse is not None and part_lse is not None:
                part_lse = convert_lse(part_lse, backend.lse_base, self.lse_base)
                if part is plan.prefill and plan.num_decode_tokens is not None:
                    is_chunk = torch.arange(len(lse), device=lse.device) >= plan.num_decode_tokens
                    part_lse = torch.where(is_chunk.unsqueeze(1), part_lse, lse)
                lse[section] = part_lse
        return out, lse

    @property
    def captures_decodes(self) -> bool:
        return self._decode.captures_decodes

    @property
    def captures_chunks(self) -> bool:
        return self._decode.captures_decodes and self._prefill.captures_chunks

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> HybridPlan:
        num_decodes, num_chunks = shape.num_decodes, shape.num_chunks
        decode = prefill = None
        if num_decodes:
            section = CaptureShape(num_decodes, num_decodes, 0)
            decode = self._decode.prepare_capture(section, tables.section(0, num_decodes))
        if num_chunks:
            section = CaptureShape(shape.num_tokens, 0, num_chunks)
            prefill = self._prefill.prepare_capture(section, tables.section(num_decodes, num_decodes + num_chunks))
        return HybridPlan(num_decodes, decode, prefill, 0, num_decode_tokens=tables.cu_query_lens[:1])

    def convert(self, plan: HybridPlan) -> None:
        if plan.decode is not None:
            self._decode.convert(plan.decode)
        if plan.prefill is not None:
            self._prefill.convert(plan.prefill)

    def prepare_replay(self, plan: HybridPlan, lens: StepLens) -> None:
        if plan.decode is not None:
            self._decode.prepare_replay(plan.decode, StepLens(lens.key_lens[: plan.num_decodes], lens.cu_query_lens))
        if plan.prefill is not None:
            self._prefill.prepare_replay(plan.prefill, StepLens(lens.key_lens[plan.num_decodes :], lens.cu_query_lens))


def slice_batch(batch: AttentionBatch, start: int, stop: int) -> AttentionBatch:
    """Return sequences ``start .. stop - 1`` of ``batch`` as a batch of their own."""
    first = sum(batch.query_lens[:start])
    num_pages = -(-max(batch.key_lens[start:stop]) // batch.page_size)
    cu_query_lens = batch.cu_query_lens[start : stop + 1] - first
    cu_key_lens = None
    if batch.cu_key_lens is not None:
        is_shared = batch.cu_key_lens is batch.cu_query_lens
        cu_key_lens = cu_query_lens if is_shared else batch.cu_key_lens[start : stop + 1] - sum(batch.key_lens[:start])
    return AttentionBatch(
        query_lens=batch.query_lens[start:stop],
        key_lens=batch.key_lens[start:stop],
        num_decodes=min(max(batch.num_decodes - start, 0), stop - start),
        cu_query_lens=cu_query_lens,
        key_lens_device=batch.key_lens_device[start:stop],
        page_table=batch.page_table[start:stop, :num_pages],
        page_size=batch.page_size,
        cu_key_lens=cu_key_lens,
    )
