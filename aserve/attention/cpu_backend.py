"""Paged attention in C, on any CPU with a compiler; see ``aserve/kernels/cpu/attention.c`` for how it works."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.attention.base import (
    PHASES,
    AttentionBackend,
    AttentionBatch,
    AttentionProblem,
    AttentionSpec,
    LayerKV,
    LseBase,
    Phase,
    dtype_name,
)
from aserve.kernels.cpu.bindings import AttentionArguments, CpuKernels, cpu_kernels

MAX_HEAD_DIM = 256
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """The arguments that all layers share, and the batch whose tensors they point into."""

    arguments: AttentionArguments
    batch: AttentionBatch


class CpuBackend(AttentionBackend):
    """Reads pools of float32, bfloat16 and float16, of any page size and group of heads; computes in float32.

    A row's result does not depend on its neighbours in the batch, on how its prompt was cut into chunks or on the
    number of threads, bit for bit; a decode's is rounded otherwise than that of a chunk's row which sees the same keys.
    """

    name = "cpu"
    lse_base: LseBase = "e"

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        phases: tuple[Phase, ...] = PHASES,
        *,
        kernels: CpuKernels | None = None,
    ) -> None:
        super().__init__(problem, device, phases)
        self._kernels = kernels or cpu_kernels()

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if problem.device_type != "cpu":
            return f"it runs on a CPU only, not on {problem.device_type}"
        if (head_dim := max(kind.head_dim for kind in problem.kinds)) > MAX_HEAD_DIM:
            return f"head_dim {head_dim} is above {MAX_HEAD_DIM}"
        if problem.kv_dtype not in KV_TYPES:
            return f"it does not read {dtype_name(problem.kv_dtype)}"
        return None

    def plan(self, batch: AttentionBatch) -> CpuPlan:
        arguments = AttentionArguments(
            page_table=batch.page_table.data_ptr(),
            table_stride=batch.page_table.stride(0),
            cu_query_lens=batch.cu_query_lens.data_ptr(),
            key_lens=batch.key_lens_device.data_ptr(),
            page_size=batch.page_size,
            num_seqs=len(batch.query_lens),
            num_decodes=batch.num_decodes,
        )
        return CpuPlan(arguments, batch)

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: CpuPlan,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        queries = q if q.dtype == torch.float32 else q.float()
        if queries.stride(2) != 1 or queries.stride(1) != spec.head_dim:
            queries = queries.contiguous()
        output = torch.empty(q.shape)
        lse = torch.empty(q.shape[:2]) if return_lse else None
        arguments = plan.arguments
        arguments.q = queries.data_ptr()
        arguments.q_stride = queries.stride(0)
        arguments.output = output.data_ptr()
        arguments.lse = None if lse is None else lse.data_ptr()
        arguments.key = layer_kv.key.data_ptr()
        arguments.value = layer_kv.value.data_ptr()
        arguments.kv_type = KV_TYPES[layer_kv.key.dtype]
        _set_spec(arguments, spec)
        if self._kernels.long.paged_attention(self._kernels.pool(), ctypes.byref(arguments)):
            raise MemoryError("no memory for the partial results of attention")
        return output.to(q.dtype) if out is None else out.copy_(output), lse


def _set_spec(arguments: AttentionArguments, spec: AttentionSpec) -> None:
    arguments.num_heads = spec.num_heads
    arguments.num_kv_heads = spec.num_kv_heads
    arguments.head_dim = spec.head_dim
    arguments.scale = spec.scale
    arguments.window = spec.sliding_window or 0
    arguments.softcap = spec.softcap or 0.0
    arguments.sinks = None if spec.sinks is None else spec.sinks.data_ptr()
