"""The small operators in C, for float32 on a CPU; anything else goes to the reference."""

import torch
from torch import Tensor

from aserve.kernels.cpu.bindings import CpuKernels, Function, Functions, cpu_kernels
from aserve.kernels.operators import KVTarget, Operators

BRIEF_VALUES = 1 << 16  # up to here a call takes some 20 us, for which the interpreter lock is not given away


class CpuOperators(Operators):
    """One C call each."""

    def __init__(self, kernels: CpuKernels | None = None) -> None:
        self._kernels = kernels or cpu_kernels()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not x.dtype == weight.dtype == torch.float32:
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        return self._norm(x, None, weight, torch.empty_like(x), eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        is_float32 = x.dtype == residual.dtype == weight.dtype == torch.float32
        if not (is_float32 and x.is_contiguous() and residual.is_contiguous()):
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(x, residual, weight, x, eps), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if not _can_gate(gate_up):
            return super().silu_mul(gate_up)
        return self._gate(self._functions(gate_up).silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        if not _can_gate(gate_up):
            return super().gelu_mul(gate_up)
        return self._gate(self._functions(gate_up).gelu_mul, gate_up)

    def rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        is_float32 = q.dtype == k.dtype == cos_sin.dtype == torch.float32
        if not (is_float32 and _has_dense_heads(q) and _has_dense_heads(k) and positions.is_contiguous()):
            return super().rope(q, k, cos_sin, positions)
        num_tokens, num_heads, head_dim = q.shape
        self._functions(q).rope(
            q.data_ptr(),
            q.stride(0),
            num_heads,
            k.data_ptr(),
            k.stride(0),
            k.shape[1],
            head_dim,
            cos_sin.data_ptr(),
            positions.data_ptr(),
            num_tokens,
        )
        return q, k

    def store_kv(self, k: Tensor, v: Tensor, target: KVTarget) -> None:
        key, value, slot_mapping = target.key, target.value, target.slot_mapping
        is_float32 = k.dtype == v.dtype == key.dtype == value.dtype == torch.float32
        is_dense = _has_dense_heads(k) and _has_dense_heads(v) and key.is_contiguous() and value.is_contiguous()
        if not (is_float32 and is_dense and slot_mapping.is_contiguous()):
            super().store_kv(k, v, target)
            return
        num_tokens, num_kv_heads, head_dim = k.shape
        self._functions(k).store_kv(
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            key.data_ptr(),
            value.data_ptr(),
            slot_mapping.data_ptr(),
            num_tokens,
            num_kv_heads * head_dim,
        )

    def _gate(self, function: Function, gate_up: Tensor) -> Tensor:
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        result = torch.empty(num_rows, width)
        function(self._kernels.pool(), gate_up.data_ptr(), result.data_ptr(), num_rows, width)
        return result

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, result: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        self._functions(x).rms_norm(
            self._kernels.pool(),
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            result.data_ptr(),
            x.numel() // width,
            width,
            eps,
        )
        return result

    def _functions(self, x: Tensor) -> Functions:
        return self._kernels.brief if x.numel() <= BRIEF_VALUES else self._kernels.long


def _can_gate(gate_up: Tensor) -> bool:
    return gate_up.dtype == torch.float32 and gate_up.is_contiguous()


def _has_dense_heads(x: Tensor) -> bool:
    """Whether in x [T, heads, D] the heads of a token stand side by side, whatever lies between tokens."""
    return x.stride()[1:] == (x.shape[2], 1)
