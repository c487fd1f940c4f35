"""FlashInfer's own cake kernels, which exist for Blackwell (sm_100a, sm_103a) only: decodes behind the name ``cake``.

Which of its kernels runs is FlashInfer's choice, its route. It is made of the step's shapes and of a bound of its
lengths, asked for and logged once for each, and its code is loaded by the first forward of a plan, which is why a plan
must have run before it is captured.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aserve.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionKind,
    AttentionProblem,
    AttentionSpec,
    CaptureShape,
    KVOrder,
    LayerKV,
    LseBase,
    Phase,
    StepTables,
    capability_name,
    dtype_name,
    refuse_device,
)
from aserve.attention.block_tables import BlockTablePool, BlockTables

logger = logging.getLogger(__name__)

CAPABILITIES = ((10, 0), (10, 3))
DTYPES = (torch.float16, torch.bfloat16)
PAGE_SIZES = {128: (16,), 256: (16, 32, 64)}  # by head_dim: with others it has only a plain kernel, or none
COMPATIBILITY = "compatibility kernel"  # where no route is
WORKSPACE_BYTES = 128 << 20
COUNTER_BYTES = 1 << 20  # of its balanced kernels, beside four for each sequence and head


@dataclass(frozen=True, slots=True)
class BlackwellPlan:
    """A step's decodes, and the routes of the kinds of layers that have run by it."""

    key_lens: Tensor  # [N] int32
    page_table: Tensor  # [N, P] int32, contiguous
    max_key_len: int
    captured: BlockTables | None = None
    routes: dict[AttentionKind, str] = field(default_factory=dict)


class CakeBlackwellBackend(AttentionBackend):
    """Reads pools of the queries' dtype or of e4m3; decodes only.

    Some routes want a head's tokens to lie together; in the other order FlashInfer takes the next best.
    """

    name = "cake"
    lse_base: LseBase = "2"
    kv_order: KVOrder = "HND"
    reads_any_order = True

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        phases: tuple[Phase, ...] = ("decode",),
        *,
        decode: Callable[..., Any] | None = None,
        select_route: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(problem, device, phases)
        if decode is None or select_route is None:
            from flashinfer.cake_fmha import select_cake_fmha_decode_route
            from flashinfer.decode import trtllm_batch_decode_with_kv_cache

            decode, select_route = trtllm_batch_decode_with_kv_cache, select_cake_fmha_decode_route
        self._decode, self._select_route = decode, select_route
        num_heads = max(kind.num_heads for kind in problem.kinds)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Zeros, to which every kernel returns what it has counted.
        num_counter_bytes = COUNTER_BYTES + 4 * problem.max_num_seqs * num_heads
        self._counters = torch.zeros(num_counter_bytes, dtype=torch.uint8, device=device)
        self._tables = BlockTablePool()
        self._reported: set[str] = set()

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if reason := refuse_device(problem):
            return reason
        if problem.capability not in CAPABILITIES:
            known = " and ".join(map(capability_name, CAPABILITIES))
            return f"FlashInfer's cake kernels are for compute capability {known}"
        if phase == "prefill":
            return "FlashInfer's cake kernels are used for decodes only"
        if problem.dtype not in DTYPES:
            return f"it computes in float16 and bfloat16, not in {dtype_name(problem.dtype)}"
        if problem.kv_dtype not in (problem.dtype, torch.float8_e4m3fn):
            return f"it does not read {dtype_name(problem.kv_dtype)} with queries in {dtype_name(problem.dtype)}"
        if problem.has_head_scales:
            return "it takes one scale for all KV heads"
        return next((reason for kind in problem.kinds if (reason := _refuse_kind(kind, problem.page_size))), None)

    @property
    def workspace_bytes(self) -> int:
        return len(self._workspace) + len(self._counters) + self._tables.num_bytes

    def plan(self, batch: AttentionBatch) -> BlackwellPlan:
        num_chunks = len(batch.key_lens) - batch.num_decodes
        if num_chunks:
            raise ValueError(f"{self.name}: it plans decodes only, not {num_chunks} chunks")
        return BlackwellPlan(batch.key_lens_device, batch.page_table.contiguous(), max(batch.key_lens))

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: BlackwellPlan,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        out = q.new_empty(q.shape) if out is None else out
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        decodes = slice(0, len(plan.key_lens))
        part = None if lse is None else lse[decodes]
        arguments = self._arguments(q[decodes].contiguous(), out[decodes], part, layer_kv, plan, spec)
        if spec.kind not in plan.routes:
            plan.routes[spec.kind] = self._report_route(arguments, plan, spec.kind)
        self._decode(backend="cake", **arguments)
        return out, lse

    def kernel_name(self, plan: BlackwellPlan, spec: AttentionSpec) -> str:
        """Return FlashInfer's route; empty before the plan has run."""
        return plan.routes.get(spec.kind, "")

    @property
    def captures_decodes(self) -> bool:
        return True

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> BlackwellPlan:
        if shape.num_chunks:
            raise ValueError(f"{self.name}: only batches of decodes are captured")
        rows = self._tables.take(tables)
        max_key_len = tables.page_table.shape[1] * tables.page_size
        return BlackwellPlan(tables.key_lens[: shape.num_decodes], rows.pages, max_key_len, captured=rows)

    def convert(self, plan: BlackwellPlan) -> None:
        if plan.captured is not None:
            plan.captured.gather()

    def _arguments(
        self, q: Tensor, out: Tensor, lse: Tensor | None, layer_kv: LayerKV, plan: BlackwellPlan, spec: AttentionSpec
    ) -> dict[str, Any]:
        return {
            "query": q,
            "kv_cache": (layer_kv.key.transpose(1, 2), layer_kv.value.transpose(1, 2)),
            "workspace_buffer": self._workspace,
            "block_tables": plan.page_table,
            "seq_lens": plan.key_lens,
            "max_seq_len": plan.max_key_len,
            "bmm1_scale": float(spec.scale * layer_kv.key_scale),
            "bmm2_scale": float(layer_kv.value_scale),
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "out": out,
            "sinks": spec.sinks,
            "kv_layout": "HND",
            "enable_pdl": True,
            "q_len_per_req": 1,
            "o_scale": 1.0,
            "lse": lse,
            "multi_ctas_kv_counter_buffer": self._counters,
        }

    def _report_route(self, arguments: dict[str, Any], plan: BlackwellPlan, kind: AttentionKind) -> str:
        """Ask which kernel FlashInfer will take, and log it the first time. Raises RuntimeError within a capture."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{self.name}: a plan must run once before it is captured, so that its kernel is loaded")
        num_seqs = len(plan.key_lens)
        keys, values = arguments["kv_cache"]
        route = self._select_route(
            self.device,
            **{name: value for name, value in arguments.items() if name not in ("kv_cache", "q_len_per_req")},
            key_cache=keys,
            value_cache=values,
            batch_size=num_seqs,
            q_len=arguments["q_len_per_req"],
            uses_shared_paged_kv_idx=True,
            cum_seq_lens_q=None,
            key_block_scales=None,
            value_block_scales=None,
            skip_softmax_threshold_scale_factor=None,
            enable_block_sparse_attention=False,
        )
        name = COMPATIBILITY if route is None else _route_name(route)
        if plan.captured is not None or name not in self._reported:
            served = f"{num_seqs} sequences of up to {plan.max_key_len} keys, head_dim {kind.head_dim}"
            logger.info("cake: FlashInfer's %s for %s", name, served)
        self._reported.add(name)
        return name


def _route_name(route: Any) -> str:
    """'decode_aligned_bf16 ALIGNED_C8_BF16': the component, and the program if it names one."""
    program = route.aligned_program or (":".join(route.program) if route.program else "")
    return f"{route.component} {program}".rstrip()


def _refuse_kind(kind: AttentionKind, page_size: int) -> str | None:
    if kind.softcap is not None:
        return "it does not cap scores"
    if kind.head_dim not in PAGE_SIZES:
        return f"it knows head_dim {', '.join(map(str, PAGE_SIZES))}, not {kind.head_dim}"
    if page_size not in PAGE_SIZES[kind.head_dim]:
        known = ", ".join(map(str, PAGE_SIZES[kind.head_dim]))
        return f"it needs page_size {known} for head_dim {kind.head_dim}, not {page_size}"
    return None
