"""TensorRT-LLM's attention by way of flashinfer: its own kernels on Blackwell, XQA for decodes on Hopper."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aserve.attention.base import (
    PHASES,
    AttentionBackend,
    AttentionBatch,
    AttentionKind,
    AttentionProblem,
    AttentionSpec,
    CaptureShape,
    LayerKV,
    LseBase,
    Phase,
    StepTables,
    capability_name,
    common_scale,
    dtype_name,
    refuse_device,
)
from aserve.attention.block_tables import BlockTablePool, BlockTables
from aserve.attention.hybrid import slice_batch

DTYPES = (torch.float16, torch.bfloat16)
FULL_CAPABILITIES = ((10, 0), (10, 3))  # with kernels for both phases
DECODE_CAPABILITIES = ((9, 0), (12, 0), (12, 1))  # with XQA
FULL_PAGE_SIZES = (16, 32, 64)
XQA_PAGE_SIZES = (16, 32, 64, 128)
FULL_HEAD_DIMS = (64, 128, 256)
XQA_MAX_GROUP = 32  # heads per KV head
FULL_WORKSPACE_BYTES = 128 << 20  # what flashinfer asks for
XQA_WORKSPACE_BYTES = 32 << 20  # semaphores, and partial results of as many thread blocks as there are units


@dataclass(frozen=True, slots=True)
class Section:
    """The decodes or the chunks of a step: tokens ``first`` and following."""

    phase: Phase
    first: int
    num_tokens: int
    key_lens: Tensor  # [N] int32
    page_table: Tensor  # [N, P] int32
    max_key_len: int
    max_query_len: int = 1
    cu_query_lens: Tensor | None = None  # [N + 1] int32, of chunks
    cu_key_lens: Tensor | None = None  # [N + 1] int32, of chunks
    captured: BlockTables | None = None


class TrtllmBackend(AttentionBackend):
    """Reads pools of float16 and bfloat16. XQA leaves no log-sum-exp."""

    name = "trtllm"
    lse_base: LseBase = "2"
    offset_bits = 36  # XQA multiplies in 32 bits, but counts whole heads of at least 16 elements

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        phases: tuple[Phase, ...] = PHASES,
        *,
        decode: Callable[..., Any] | None = None,
        prefill: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(problem, device, phases)
        if decode is None or prefill is None:
            from flashinfer.decode import trtllm_batch_decode_with_kv_cache
            from flashinfer.prefill import trtllm_batch_context_with_kv_cache

            decode, prefill = trtllm_batch_decode_with_kv_cache, trtllm_batch_context_with_kv_cache
        self._decode, self._prefill = decode, prefill
        self._uses_xqa = problem.capability not in FULL_CAPABILITIES
        num_bytes = XQA_WORKSPACE_BYTES if self._uses_xqa else FULL_WORKSPACE_BYTES
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._tables = BlockTablePool()

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if reason := refuse_device(problem):
            return reason
        if problem.dtype not in DTYPES:
            return f"it computes in float16 and bfloat16, not in {dtype_name(problem.dtype)}"
        if problem.kv_dtype != problem.dtype:
            return f"with keys in {dtype_name(problem.kv_dtype)} it would want queries in 8 bits, too"
        if any(kind.softcap is not None for kind in problem.kinds):
            return "it does not cap scores"
        is_full = problem.capability in FULL_CAPABILITIES
        if not is_full and problem.capability not in DECODE_CAPABILITIES:
            return f"it has no kernels for compute capability {capability_name(problem.capability)}"
        if not is_full and phase == "prefill":
            return "on this GPU only its decode kernel, XQA, runs"
        if not is_full and problem.needs_lse:
            return "XQA, the decode kernel of this GPU, leaves no log-sum-exp"
        page_sizes = FULL_PAGE_SIZES if is_full else XQA_PAGE_SIZES
        if problem.page_size not in page_sizes:
            return f"it needs page_size {', '.join(map(str, page_sizes))}, not {problem.page_size}"
        return next((reason for kind in problem.kinds if (reason := _refuse_kind(kind, is_full=is_full))), None)

    def plan(self, batch: AttentionBatch) -> list[Section]:
        num_decodes, num_seqs = batch.num_decodes, len(batch.query_lens)
        sections = []
        if num_decodes:
            part = batch if num_decodes == num_seqs else slice_batch(batch, 0, num_decodes)
            table = part.page_table.contiguous()
            sections.append(Section("decode", 0, num_decodes, part.key_lens_device, table, max(part.key_lens)))
        if num_decodes < num_seqs:
            part = slice_batch(batch, num_decodes, num_seqs) if num_decodes else batch
            sections.append(_plan_chunks(part, num_decodes))
        return sections

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
        if return_lse and self._uses_xqa:
            raise ValueError("trtllm: XQA, the decode kernel of this GPU, leaves no log-sum-exp")
        out = q.new_empty(q.shape) if out is None else out
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        for section in plan:
            tokens = slice(section.first, section.first + section.num_tokens)
            arguments = self._common_arguments(q[tokens], out[tokens], layer_kv, section, spec)
            if lse is not None:
                arguments["lse"] = lse[tokens]
            if section.phase == "decode":
                self._decode(max_seq_len=section.max_key_len, **arguments)
            else:
                self._prefill(
                    max_q_len=section.max_query_len,
                    max_kv_len=section.max_key_len,
                    batch_size=len(section.key_lens),
                    cum_seq_lens_q=section.cu_query_lens,
                    cum_seq_lens_kv=section.cu_key_lens,
                    **arguments,
                )
        return out, lse

    def _common_arguments(
        self, q: Tensor, out: Tensor, layer_kv: LayerKV, section: Section, spec: AttentionSpec
    ) -> dict[str, Any]:
        return {
            "query": q.contiguous(),
            "kv_cache": (layer_kv.key, layer_kv.value),
            "workspace_buffer": self._workspace,
            "block_tables": section.page_table,
            "seq_lens": section.key_lens.view(torch.uint32) if self._uses_xqa else section.key_lens,
            "bmm1_scale": spec.scale * common_scale(layer_kv.key_scale),
            "bmm2_scale": common_scale(layer_kv.value_scale),
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "out": out,
            "sinks": spec.sinks,
            "kv_layout": "NHD",
        }

    @property
    def captures_decodes(self) -> bool:
        return True

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> list[Section]:
        if shape.num_chunks:
            raise ValueError(f"{self.name}: only batches of decodes are captured")
        rows = self._tables.take(tables)
        max_key_len = tables.page_table.shape[1] * tables.page_size
        section = Section("decode", 0, shape.num_decodes, tables.key_lens, rows.pages, max_key_len, captured=rows)
        return [section]

    def convert(self, plan: list[Section]) -> None:
        for section in plan:
            if section.captured is not None:
                section.captured.gather()


def _plan_chunks(part: AttentionBatch, first: int) -> Section:
    cu_key_lens = part.cu_key_lens
    if cu_key_lens is None:
        zero = part.key_lens_device.new_zeros(1)
        cu_key_lens = torch.cat((zero, part.key_lens_device.cumsum(0, dtype=torch.int32)))
    return Section(
        phase="prefill",
        first=first,
        num_tokens=sum(part.query_lens),
        key_lens=part.key_lens_device,
        page_table=part.page_table.contiguous(),
        max_key_len=max(part.key_lens),
        max_query_len=max(part.query_lens),
        cu_query_lens=part.cu_query_lens,
        cu_key_lens=cu_key_lens,
    )


def _refuse_kind(kind: AttentionKind, *, is_full: bool) -> str | None:
    if is_full:
        known = ", ".join(map(str, FULL_HEAD_DIMS))
        return None if kind.head_dim in FULL_HEAD_DIMS else f"it knows head_dim {known}, not {kind.head_dim}"
    if kind.head_dim % 16 or kind.head_dim > 256:
        return f"it knows head_dim up to 256 in steps of 16, not {kind.head_dim}"
    group = kind.num_heads // kind.num_kv_heads
    return None if group <= XQA_MAX_GROUP else f"it serves up to {XQA_MAX_GROUP} heads per KV head, not {group}"
