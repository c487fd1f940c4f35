"""Two backends as one: one for prefill chunks, one for decodes, each planning its own slice of a step."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aserve.attention.base import AttentionBackend, AttentionBatch, AttentionSpec, LayerKV, LseBase
from aserve.attention.merge import convert_lse
from aserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """The plans of both slices, None for an empty one; the first ``num_decodes`` tokens are decodes."""

    num_decodes: int
    decode: Any
    prefill: Any


class HybridBackend(AttentionBackend):
    """Capture and replay belong to the decode backend. LSEs leave in base e, whatever the two speak."""

    lse_base: LseBase = "e"

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        """Raise ConfigError if the two cannot read one pool."""
        self.name = f"{prefill.name},{decode.name}"
        if prefill.kv_order != decode.kv_order:
            raise ConfigError(
                f"attention backends {self.name!r} cannot share a pool: "
                f"{prefill.name} wants pages in {prefill.kv_order} order, {decode.name} in {decode.kv_order}"
            )
        super().__init__(decode.problem, decode.device)
        self.kv_order = decode.kv_order
        self.offset_bits = min(prefill.offset_bits, decode.offset_bits)
        self._prefill = prefill
        self._decode = decode

    def plan(self, batch: AttentionBatch) -> HybridPlan:
        num_decodes, num_seqs = batch.num_decodes, len(batch.key_lens)
        if num_decodes == num_seqs:
            return HybridPlan(num_decodes, self._decode.plan(batch), None)
        if num_decodes == 0:
            return HybridPlan(0, None, self._prefill.plan(batch))
        decode = self._decode.plan(slice_batch(batch, 0, num_decodes))
        return HybridPlan(num_decodes, decode, self._prefill.plan(slice_batch(batch, num_decodes, num_seqs)))

    def forward(
        self, q: Tensor, layer_kv: LayerKV, plan: HybridPlan, spec: AttentionSpec, *, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        border = plan.num_decodes
        parts = []
        if plan.decode is not None:
            queries = q if plan.prefill is None else q[:border]
            parts.append(_run(self._decode, queries, layer_kv, plan.decode, spec, return_lse))
        if plan.prefill is not None:
            parts.append(_run(self._prefill, q[border:], layer_kv, plan.prefill, spec, return_lse))
        if len(parts) == 1:
            return parts[0]
        lses = [lse for _, lse in parts if lse is not None]
        return torch.cat([output for output, _ in parts]), torch.cat(lses) if lses else None

    @property
    def supports_capture(self) -> bool:
        return self._decode.supports_capture

    def prepare_capture(self, batch: AttentionBatch) -> HybridPlan:
        return HybridPlan(batch.num_decodes, self._decode.prepare_capture(batch), None)

    def prepare_replay(self, captured_plan: Any, batch: AttentionBatch) -> None:
        self._decode.prepare_replay(captured_plan.decode, batch)


def _run(
    backend: AttentionBackend, q: Tensor, layer_kv: LayerKV, plan: Any, spec: AttentionSpec, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    output, lse = backend.forward(q, layer_kv, plan, spec, return_lse=return_lse)
    return output, None if lse is None else convert_lse(lse, backend.lse_base, "e")


def slice_batch(batch: AttentionBatch, start: int, stop: int) -> AttentionBatch:
    """Return sequences ``start .. stop - 1`` of ``batch`` as a batch of their own."""
    first = sum(batch.query_lens[:start])
    last = first + sum(batch.query_lens[start:stop])
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
        slot_mapping=batch.slot_mapping[first:last],
        positions=batch.positions[first:last],
        page_size=batch.page_size,
        cu_key_lens=cu_key_lens,
    )
