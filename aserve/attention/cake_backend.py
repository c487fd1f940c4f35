"""This project's own kernels; nothing is planned on the host: work is dealt to programs on the device."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.attention.base import (
    PHASES,
    AttentionBackend,
    AttentionBatch,
    AttentionProblem,
    AttentionSpec,
    CaptureShape,
    DecodeOrder,
    LayerKV,
    LseBase,
    Phase,
    StepTables,
    refuse_device,
)
from aserve.attention.cake_blackwell import CAPABILITIES, BlackwellDecodes, BlackwellPlan, refuse_flash_infer_cake
from aserve.attention.cake_choice import refuse_decodes, refuse_prefill
from aserve.attention.cake_chunks import CakeChunks, ChunkPlan
from aserve.attention.cake_decodes import CakeDecodes, DecodePlan, Decodes
from aserve.kernels.cake.architectures import refuse_architecture
from aserve.kernels.cake.attention_call import (
    MAX_PAGE_SIZE,
    AttentionCall,
    KVPages,
    PagedBatch,
    ScoreRules,
    prefers_head_major,
)

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class CakePlan:
    """A step's decodes and its chunks, None where there are none.

    In a captured plan the decodes' section covers the tokens of chunks too, and the chunks' overwrites these.
    """

    decodes: DecodePlan | BlackwellPlan | None
    chunks: ChunkPlan | None
    is_captured: bool  # with tables that each replay finds rewritten


class CakeBackend(AttentionBackend):
    """Reads pools of any page size and order, of the queries' dtype or of e4m3."""

    name = "cake"
    lse_base: LseBase = "e"
    reads_any_order = True
    decode_order: DecodeOrder = "long and short"  # so that no share of programs has more sequences than others

    def __init__(self, problem: AttentionProblem, device: torch.device, phases: tuple[Phase, ...] = PHASES) -> None:
        super().__init__(problem, device, phases)
        self._decodes: Decodes | None = _make_decodes(problem, device) if "decode" in phases else None
        if isinstance(self._decodes, BlackwellDecodes) or prefers_head_major(problem.kv_dtype):
            self.kv_order = "HND"
        self._chunks = CakeChunks(problem, device) if "prefill" in phases else None
        self._rows = torch.arange(problem.max_num_seqs, dtype=torch.int32, device=device)

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if reason := refuse_device(problem, MIN_CAPABILITY):
            return reason
        if problem.page_size > MAX_PAGE_SIZE:
            return f"it knows page_size up to {MAX_PAGE_SIZE}, not {problem.page_size}"
        if reason := refuse_architecture(problem.capability):
            return reason
        return refuse_prefill(problem) if phase == "prefill" else refuse_decodes(problem)

    def plan(self, batch: AttentionBatch) -> CakePlan:
        num_decodes, num_seqs = batch.num_decodes, len(batch.key_lens)
        tables = StepTables(
            page_table=batch.page_table,
            rows=self._rows[:num_seqs],
            key_lens=batch.key_lens_device,
            cu_query_lens=batch.cu_query_lens[num_decodes:],
            page_size=batch.page_size,
        )
        shape = CaptureShape(sum(batch.query_lens), num_decodes, num_seqs - num_decodes)
        plan = self._make_plan(shape, tables, is_captured=False)
        self._deal_out(plan)
        return plan

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: CakePlan,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        out = q.new_empty(q.shape) if out is None else out
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        pages = KVPages(layer_kv.key, layer_kv.value, layer_kv.key_scale, layer_kv.value_scale, layer_kv.block_scales)
        rules = ScoreRules(spec.scale, spec.sliding_window, spec.softcap, spec.sinks)
        if plan.decodes is not None and self._decodes is not None:
            tokens = slice(0, len(plan.decodes.batch.rows))
            part = None if lse is None else lse[tokens]
            call = AttentionCall(q[tokens], out[tokens], part, pages, plan.decodes.batch, rules)
            call.check()
            self._decodes.attend(call, plan.decodes, spec.kind)
        if plan.chunks is not None and self._chunks is not None:
            call = AttentionCall(q, out, lse, pages, plan.chunks.batch, rules)
            call.check()
            self._chunks.attend(call, plan.chunks, spec.kind)
        return out, lse

    def kernel_name(self, plan: CakePlan, spec: AttentionSpec) -> str:
        names = []
        if plan.decodes is not None and self._decodes is not None:
            names.append(self._decodes.kernel_name(plan.decodes, spec.kind))
        if plan.chunks is not None and self._chunks is not None:
            names.append(self._chunks.kernel_name(plan.chunks, spec.kind))
        return ", ".join(names)

    @property
    def captures_decodes(self) -> bool:
        return self._decodes is not None

    @property
    def captures_chunks(self) -> bool:
        return self._chunks is not None

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> CakePlan:
        return self._make_plan(shape, tables, is_captured=True)

    def convert(self, plan: CakePlan) -> None:
        if plan.is_captured:
            self._deal_out(plan)

    def _make_plan(self, shape: CaptureShape, tables: StepTables, *, is_captured: bool) -> CakePlan:
        num_decodes, num_seqs = shape.num_decodes, shape.num_decodes + shape.num_chunks
        decodes = chunks = None
        if num_decodes:
            if self._decodes is None:
                raise ValueError(f"{self.name}: it was built for chunks only, not for {num_decodes} decodes")
            section = tables.section(0, num_decodes)
            batch = PagedBatch(section.page_table, section.rows, section.key_lens, section.page_size)
            decodes = self._decodes.plan(batch)
        if shape.num_chunks:
            if self._chunks is None:
                raise ValueError(f"{self.name}: it was built for decodes only, not for {shape.num_chunks} chunks")
            section = tables.section(num_decodes, num_seqs)
            starts = section.cu_query_lens
            batch = PagedBatch(section.page_table, section.rows, section.key_lens, section.page_size, starts)
            chunks = self._chunks.plan(batch, shape.num_tokens)
        return CakePlan(decodes, chunks, is_captured)

    def _deal_out(self, plan: CakePlan) -> None:
        if plan.decodes is not None and self._decodes is not None:
            self._decodes.share_out(plan.decodes)
        if plan.chunks is not None and self._chunks is not None:
            self._chunks.cut(plan.chunks)


def _make_decodes(problem: AttentionProblem, device: torch.device) -> Decodes:
    """Return FlashInfer's kernels where there are such and they serve all layers, else this project's."""
    reason = refuse_flash_infer_cake(problem)
    if reason is None:
        return BlackwellDecodes(problem, device)
    if problem.capability in CAPABILITIES:
        logger.info("cake: own kernels for decodes instead of FlashInfer's (%s)", reason)
    return CakeDecodes.for_decodes(problem, device)
