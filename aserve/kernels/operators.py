"""The small fused operators around attention and the linear layers, in plain torch.

A device with something faster subclasses ``Operators``; models get one instance as an argument and
never ask which.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


class Operators:
    """Reference implementation for any device and dtype; norms accumulate in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight over the last dimension."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return weight * x32.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``(rms_norm(x + residual), x + residual)``; may reuse the inputs' memory."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up for gate_up [T, 2 * I] with the gate first; result [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [T, H, D] and k [T, K, D]; cos_sin [max positions, D] float32, cosines in its first half.

        Pairs are (i, i + D/2), as in the transformers library. May write in place.
        """
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2]
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def store_kv(self, k: Tensor, v: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Write k, v [T, K, D] to the pages key, value [pages, page_size, K, D] at ``slot_mapping`` [T].

        The pages may be a transposed view of [pages, K, page_size, D] in memory.
        """
        for pages, new in ((key, k), (value, v)):
            if pages.is_contiguous():
                pages.view(-1, *pages.shape[2:])[slot_mapping] = new.to(pages.dtype)
            else:
                pages[slot_mapping // pages.shape[1], slot_mapping % pages.shape[1]] = new.to(pages.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
