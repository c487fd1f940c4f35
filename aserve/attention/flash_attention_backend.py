"""FlashAttention over the paged pool: a call for the decodes of a step and one for its chunks."""

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
    LayerKV,
    LseBase,
    Phase,
    StepTables,
    dtype_name,
    refuse_device,
)
from aserve.attention.block_tables import BlockTablePool, BlockTables
from aserve.attention.flash_attention_flavours import FlashAttentionFlavour, RaggedCall, choose_flavour
from aserve.attention.hybrid import slice_batch
from aserve.errors import ConfigError

DTYPES = (torch.float16, torch.bfloat16)
MAX_CAPTURED_CHUNKS = 256  # beyond, flash-attn-4 looks sequences up with further kernels, compiled for it


@dataclass(frozen=True, slots=True)
class Section:
    """The decodes or the chunks of a step: tokens ``first`` and following."""

    flavour: FlashAttentionFlavour
    first: int
    num_tokens: int
    cu_query_lens: Tensor  # [N + 1] int32
    key_lens: Tensor  # [N] int32
    cu_key_lens: Tensor | None
    page_table: Tensor  # [N, P] int32
    max_query_len: int
    max_key_len: int
    captured: BlockTables | None = None


class FlashAttentionBackend(AttentionBackend):
    """Reads pools of float16 and bfloat16. Which flavour serves a phase depends on the GPU and what is installed."""

    name = "fa"
    lse_base: LseBase = "e"

    def __init__(self, problem: AttentionProblem, device: torch.device, phases: tuple[Phase, ...] = PHASES) -> None:
        super().__init__(problem, device, phases)
        loaded: dict[type[FlashAttentionFlavour], FlashAttentionFlavour] = {}
        self._flavours: dict[Phase, FlashAttentionFlavour] = {}
        for phase in phases:
            flavour = choose_flavour(problem, phase)
            if isinstance(flavour, str):
                raise ConfigError(f"attention backend 'fa' cannot serve {phase}: {flavour}")
            if flavour not in loaded:
                loaded[flavour] = flavour(problem)
            self._flavours[phase] = loaded[flavour]
        self._tables = BlockTablePool()

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if reason := refuse_device(problem):
            return reason
        if problem.dtype not in DTYPES:
            return f"it computes in float16 and bfloat16, not in {dtype_name(problem.dtype)}"
        if problem.kv_dtype != problem.dtype:
            return f"it does not read {dtype_name(problem.kv_dtype)} with queries in {dtype_name(problem.dtype)}"
        flavour = choose_flavour(problem, phase)
        return flavour if isinstance(flavour, str) else None

    def plan(self, batch: AttentionBatch) -> list[Section]:
        num_decodes, num_seqs = batch.num_decodes, len(batch.query_lens)
        parts: list[tuple[Phase, int, int]] = [("decode", 0, num_decodes), ("prefill", num_decodes, num_seqs)]
        return [self._section(phase, batch, start, stop) for phase, start, stop in parts if start < stop]

    def _section(self, phase: Phase, batch: AttentionBatch, start: int, stop: int) -> Section:
        part = batch if stop - start == len(batch.query_lens) else slice_batch(batch, start, stop)
        return Section(
            flavour=self._flavours[phase],
            first=sum(batch.query_lens[:start]),
            num_tokens=sum(part.query_lens),
            cu_query_lens=part.cu_query_lens,
            key_lens=part.key_lens_device,
            cu_key_lens=part.cu_key_lens,
            page_table=part.page_table,
            max_query_len=max(part.query_lens),
            max_key_len=max(part.key_lens),
        )

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: list[Section],
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        out = q.new_empty(q.shape) if out is None else out
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        for section in plan:
            tokens = slice(section.first, section.first + section.num_tokens)
            call = RaggedCall(
                q=q[tokens],
                out=out[tokens],
                layer_kv=layer_kv,
                spec=spec,
                cu_query_lens=section.cu_query_lens,
                key_lens=section.key_lens,
                cu_key_lens=section.cu_key_lens,
                page_table=section.page_table,
                max_query_len=section.max_query_len,
                max_key_len=section.max_key_len,
                return_lse=return_lse,
            )
            section_lse = section.flavour.attend(call)
            if lse is not None and section_lse is not None:
                lse[tokens] = section_lse.T
        return out, lse

    @property
    def captures_chunks(self) -> bool:
        """Only chunks: with another backend for the decodes, which are then captured if that one captures them."""
        return self.phases == ("prefill",) and self._flavours["prefill"].can_be_captured

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> list[Section]:
        if shape.num_decodes or shape.num_chunks > MAX_CAPTURED_CHUNKS or not self.captures_chunks:
            raise ValueError(f"{self.name}: only chunks of a 'prefill,decode' pair are captured, at most 256 of them")
        rows = self._tables.take(tables)
        section = Section(
            flavour=self._flavours["prefill"],
            first=0,
            num_tokens=shape.num_tokens,
            cu_query_lens=tables.cu_query_lens,
            key_lens=tables.key_lens,
            cu_key_lens=None,
            page_table=rows.pages,
            max_query_len=shape.num_tokens,
            max_key_len=tables.page_table.shape[1] * tables.page_size,
            captured=rows,
        )
        return [section]

    def convert(self, plan: list[Section]) -> None:
        for section in plan:
            if section.captured is not None:
                section.captured.gather()
