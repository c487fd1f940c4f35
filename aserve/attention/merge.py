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


def merge_stacked(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over any number of disjoint sets of keys, always in their order.

    ``outputs`` [N, T, H, D] and ``lses`` [N, T, H], float32 in base e. Where an LSE is -inf, there were no keys, and
    the output may be anything. Returns [T, H, D] and [T, H].
    """
    is_empty = lses == -math.inf
    merged = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - merged.masked_fill(merged == -math.inf, 0.0))  # -inf - -inf would be NaN
    return (outputs.masked_fill(is_empty.unsqueeze(-1), 0.0) * weights.unsqueeze(-1)).sum(0), merged
