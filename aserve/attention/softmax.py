"""The arithmetic of attention on gathered keys: scores, soft-cap, mask, sinks, softmax, LSE. Knows no pages."""

import math

import torch
from torch import Tensor

from aserve.attention.base import AttentionSpec


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, is_hidden: Tensor, spec: AttentionSpec, *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend with float32 ``queries`` [N, B, H, D] to ``keys`` and ``values`` [N, K, L, D] of N sequences.

    ``is_hidden`` [N or 1, B, L] marks the keys that a query does not see; each query sees at least one.
    Returns [N, B, H, D] and, if asked for, the LSE [N, B, H] in base e.
    """
    num_seqs, num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = spec.num_kv_heads
    grouped = (queries * spec.scale).view(num_seqs, num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(num_seqs, num_kv_heads, -1, head_dim) @ keys.mT  # [N, K, G * B, L]
    if spec.softcap is not None:
        scores = torch.tanh_(scores.div_(spec.softcap)).mul_(spec.softcap)
    scores = scores.view(num_seqs, num_heads, num_queries, -1).masked_fill_(is_hidden.unsqueeze(1), -math.inf)
    lse = None
    if return_lse or spec.sinks is not None:
        lse = torch.logsumexp(scores, -1)  # [N, H, B]
        if spec.sinks is not None:
            lse = torch.logaddexp(lse, spec.sinks.view(-1, 1))
        weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    else:
        weights = torch.softmax(scores, -1)
    output = weights.view(num_seqs, num_kv_heads, -1, weights.shape[-1]) @ values  # [N, K, G * B, D]
    output = output.view(num_seqs, num_heads, num_queries, head_dim).transpose(1, 2)
    return output, lse.transpose(1, 2) if lse is not None else None
