"""Decodes of the backend ``cake`` by FlashInfer's own cake kernels, which exist for sm_100a and sm_103a only.

Which of its kernels runs is FlashInfer's choice, its route. It is made of the step's shapes and of a bound of its
lengths, asked for and logged once for each, and its code is loaded by the first layer of a plan, which is why a plan
must have run before it is captured.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aserve.attention.base import AttentionKind, AttentionProblem, capability_name, dtype_name
from aserve.attention.installed import cake_fmha_refusal
from aserve.kernels.cake.attention_call import AttentionCall, PagedBatch

logger = logging.getLogger(__name__)

CAPABILITIES = ((10, 0), (10, 3))
DTYPES = (torch.float16, torch.bfloat16)
PAGE_SIZES = {128: (16,), 256: (16, 32, 64)}  # by head_dim: with others it has only a plain kernel, or none
COMPATIBILITY = "compatibility kernel"  # where no route is
WORKSPACE_BYTES = 128 << 20
COUNTER_BYTES = 1 << 20  # of its balanced kernels, beside four for each sequence and head


def refuse_flash_infer_cake(problem: AttentionProblem) -> str | None:
    """Say why FlashInfer's cake kernels are not used for the decodes of ``problem``, or None if they are."""
    if problem.capability not in CAPABILITIES:
        known = " and ".join(map(capability_name, CAPABILITIES))
        return f"FlashInfer's cake kernels are for compute capability {known}"
    if reason := cake_fmha_refusal():
        return reason
    if problem.cake_variants:
        return "variants of the own family are pinned"
    if problem.dtype not in DTYPES:
        return f"it computes in float16 and bfloat16, not in {dtype_name(problem.dtype)}"
    if problem.kv_dtype not in (problem.dtype, torch.float8_e4m3fn):
        return f"it does not read {dtype_name(problem.kv_dtype)} with queries in {dtype_name(problem.dtype)}"
    if problem.has_head_scales:
        return "it takes one scale for all KV heads"
    return next((reason for kind in problem.kinds if (reason := _refuse_kind(kind, problem.page_size))), None)


@dataclass(frozen=True, slots=True)
class BlackwellPlan:
    """A step's decodes, their rows of the page table, and the routes of the kinds of layers that have run by it."""

    batch: PagedBatch
    page_table: Tensor  # [N, W] int32, contiguous
    routes: dict[AttentionKind, str] = field(default_factory=dict)

    @property
    def max_key_len(self) -> int:
        """Keys that the table has room for."""
        return self.page_table.shape[1] * self.batch.page_size


class BlackwellDecodes:
    """Plans and runs decodes for all kinds of a problem's layers.

    Some routes want the tokens of a head to lie together; in the other order FlashInfer takes the next best.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        *,
        decode: Callable[..., Any] | None = None,
        select_route: Callable[..., Any] | None = None,
    ) -> None:
        if decode is None or select_route is None:
            from flashinfer.cake_fmha import select_cake_fmha_decode_route
            from flashinfer.decode import trtllm_batch_decode_with_kv_cache

            decode, select_route = trtllm_batch_decode_with_kv_cache, select_cake_fmha_decode_route
        self._device, self._decode, self._select_route = device, decode, select_route
        num_heads = max(kind.num_heads for kind in problem.kinds)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Zeros, to which every kernel returns what it has counted.
        num_counter_bytes = COUNTER_BYTES + 4 * problem.max_num_seqs * num_heads
        self._counters = torch.zeros(num_counter_bytes, dtype=torch.uint8, device=device)
        self._reported: set[tuple[str, int, int]] = set()

    def plan(self, batch: PagedBatch) -> BlackwellPlan:
        """Make room for the rows of the page table in the step's order."""
        return BlackwellPlan(batch, batch.page_table.new_zeros(len(batch.rows), batch.page_table.shape[1]))

    def share_out(self, plan: BlackwellPlan) -> None:
        """Enqueue the copy of the rows."""
        torch.index_select(plan.batch.page_table, 0, plan.batch.rows, out=plan.page_table)

    def attend(self, call: AttentionCall, plan: BlackwellPlan, kind: AttentionKind) -> None:
        """Enqueue one layer's kernels. Raises RuntimeError in the capture of a plan that has not run before."""
        arguments = self._arguments(call, plan)
        if kind not in plan.routes:
            plan.routes[kind] = self._find_route(arguments, plan, kind)
        self._decode(backend="cake", **arguments)
        if call.lse is not None:
            call.lse.mul_(math.log(2))  # from base 2

    def kernel_name(self, plan: BlackwellPlan, kind: AttentionKind) -> str:
        """Return the route; empty before the plan has run."""
        return plan.routes.get(kind, "")

    def _arguments(self, call: AttentionCall, plan: BlackwellPlan) -> dict[str, Any]:
        pages, rules = call.pages, call.rules
        return {
            "query": call.q.contiguous(),
            "kv_cache": (pages.keys.transpose(1, 2), pages.values.transpose(1, 2)),
            "workspace_buffer": self._workspace,
            "block_tables": plan.page_table,
            "seq_lens": plan.batch.key_lens,
            "max_seq_len": plan.max_key_len,
            "bmm1_scale": float(rules.scale * pages.key_scale),
            "bmm2_scale": float(pages.value_scale),
            "window_left": -1 if rules.window is None else rules.window - 1,
            "out": call.out,
            "sinks": rules.sinks,
            "kv_layout": "HND",
            "enable_pdl": True,
            "q_len_per_req": 1,
            "o_scale": 1.0,
            "lse": call.lse,
            "multi_ctas_kv_counter_buffer": self._counters,
        }

    def _find_route(self, arguments: dict[str, Any], plan: BlackwellPlan, kind: AttentionKind) -> str:
        """Ask which kernel FlashInfer will take, and log it the first time."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("cake: a plan must run once before it is captured, so that its kernel is loaded")
        num_seqs = len(plan.batch.rows)
        keys, values = arguments["kv_cache"]
        route = self._select_route(
            self._device,
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
        if (name, num_seqs, kind.head_dim) not in self._reported:
            served = f"{num_seqs} sequences of up to {plan.max_key_len} keys, head_dim {kind.head_dim}"
            logger.info("cake: FlashInfer's %s for %s", name, served)
        self._reported.add((name, num_seqs, kind.head_dim))
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
