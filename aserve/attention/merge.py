"""Bases of log-sum-exps, and the merge of attention over disjoint sets of keys.

A backend declares the base of its LSE; whoever mixes two of them converts here first.
"""

import math

import torch
from torch import Tensor

from aserve.attention.base import LseBase


def convert_lse(lse: Tensor, source: LseBase, target: LseBase) -> Tensor:
    """Return ``lse`` in base ``target``: log2(z) = ln(z) / ln(2)."""
    if source == target:
        return lse
    return lse * math.log(2.0) if source == "2" else lse / math.log(2.0)


def merge_partials(
    output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor, *, base: LseBase = "e"
) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys into attention over both.

    For whoever splits the keys of a query, between a shared prefix and the rest, say. No backend here does yet, but
    each promises LSEs that can be merged so (``return_lse``).

    Outputs [T, H, D], LSEs [T, H] float32, both in ``base``; an LSE of -inf means no keys. The
    result has ``output_a``'s dtype and its LSE the same base.
    """
    a, b = convert_lse(lse_a, base, "e"), convert_lse(lse_b, base, "e")
    merged = torch.logaddexp(a, b)
    shift = torch.where(merged == -math.inf, 0.0, merged)  # -inf - -inf would be NaN
    weight_a, weight_b = torch.exp(a - shift).unsqueeze(-1), torch.exp(b - shift).unsqueeze(-1)
    output = output_a.float() * weight_a + output_b.float() * weight_b
    return output.to(output_a.dtype), convert_lse(merged, "e", base)
