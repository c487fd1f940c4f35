"""Which transform of a layer's keys lets noise on stored keys disturb attention least, as far as a sample shows it.

Numbers of few bits bring noise of about the same share of each block to all channels. Where a channel's keys are large
and its queries small, or the other way round, or keys stand far from zero, scores suffer more than they must.

- Keys are taken from their mean, which takes the same from all scores of a query, so that softmax does not see it.
- A basis is chosen in which keys and queries have the same covariance, a diagonal one. Among all bases this makes the
  sizes of keys times those of queries least; in control theory it is the balanced form of a system.
- A rotation then spreads these channels evenly, so that every block looks alike; or, where a key's second half can make
  up for the first, halves are formed for that (``error_feedback``).

A sample counts as much as attention depends on it: an error e of the score of a key with the share p of a query and the
value v moves the output o by p (v - o) e. So pairs that no one looks at, and those that nothing competes with, count
little.
"""

import math

import torch
from torch import Tensor

from aserve.attention.base import AttentionSpec
from aserve.attention.error_feedback import pair_channels
from aserve.attention.rotation import spread
from aserve.kernels.key_transform import KeyTransform

QUERY_STRIDE = 4  # of every so many queries one is looked at, which shows as much in a part of the time
RIDGE = 0.01  # of the mean variance, added to each; a sample may show nothing of some direction
FLOOR = 1e-6  # of variances, so that heads whose keys or queries are all zero have a basis, too


def balance_keys(
    queries: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, *, feeds_back: bool
) -> KeyTransform:
    """Return the transform for a layer: ``queries`` [T, H, D], ``keys`` and ``values`` [T, K, D] are of one sequence.

    It has a feedback if ``feeds_back``; D is even then. Its offset is zero where scores count for themselves: with
    sinks beside them, or bent by a soft-cap.
    """
    num_tokens, num_kv_heads, head_dim = keys.shape
    asked = torch.arange(0, num_tokens, QUERY_STRIDE, device=keys.device)
    grouped = queries[asked].float().view(len(asked), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [K, G, Q, D]
    apart, values_apart = (x.float().transpose(0, 1) for x in (keys, values))  # [K, T, D]
    sinks = None if spec.sinks is None else spec.sinks.view(num_kv_heads, -1)
    is_hidden = _hide(asked, num_tokens, spec.sliding_window)
    weights = [
        _weigh(grouped[head], apart[head], values_apart[head], is_hidden, spec, None if sinks is None else sinks[head])
        for head in range(num_kv_heads)
    ]
    of_queries, of_keys = (torch.stack(parts) for parts in zip(*weights, strict=True))  # [K, G, Q] and [K, T]
    # Small matrices are taken apart on the host, in float64: the same on all ranks.
    grouped, apart, of_queries, of_keys = (x.double().cpu() for x in (grouped, apart, of_queries, of_keys))
    shares = (of_keys / of_keys.sum(1, keepdim=True).clamp(min=FLOOR)).unsqueeze(2)
    mean = (shares * apart).sum(1)  # [K, D]
    if spec.sinks is not None or spec.softcap is not None:
        mean.zero_()
    centred = apart - mean.unsqueeze(1)
    key_moments = centred.mT @ (shares * centred)
    query_moments = ((of_queries.unsqueeze(3) * grouped).mT @ grouped).sum(1)
    key, query, sizes = _balance(query_moments, key_moments)
    feedback = None
    if feeds_back:
        key, query, feedback = pair_channels(key, query, sizes)
        feedback = feedback.float().to(keys.device)
    else:
        key, query = key @ spread(head_dim), query @ spread(head_dim)
    offset = (mean.unsqueeze(1) @ key).squeeze(1)
    key, query, offset = (x.float().to(keys.device) for x in (key, query, offset))
    return KeyTransform(key, query, offset, feedback)


def _hide(asked: Tensor, num_tokens: int, window: int | None) -> Tensor:
    """Mark the keys [T] that queries at the places ``asked`` [Q] do not see, [Q, T]."""
    distances = asked.unsqueeze(1) - torch.arange(num_tokens, device=asked.device)
    return distances < 0 if window is None else (distances < 0) | (distances >= window)


def _weigh(
    queries: Tensor, keys: Tensor, values: Tensor, is_hidden: Tensor, spec: AttentionSpec, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return how much each of ``queries`` [G, Q, D] counts, [G, Q], and each of ``keys`` [T, D], [T].

    ``values`` are [T, D].
    """
    scores = queries @ keys.T * spec.scale  # [G, Q, T]
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores.masked_fill_(is_hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, len(is_hidden), 1)), dim=-1)
    shares = torch.softmax(scores, -1)[..., : len(keys)]
    outputs = shares @ values  # [G, Q, D]
    squares = values.square().sum(1) - 2 * outputs @ values.T + outputs.square().sum(2, keepdim=True)
    counts = shares.square_().mul_(squares.clamp_(min=0.0))
    return counts.sum(2), counts.sum((0, 1))


def _balance(query_moments: Tensor, key_moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return A and its transpose's inverse, [K, D, D], so that keys @ A and queries @ A^-T have the same moments.

    These are diagonal, and returned, too, [K, D], the largest first.
    With Cholesky's factors Q Q^T of queries and K K^T of keys, and Q^T K = U S V^T: A = Q U S^-1/2, A^-T = K V S^-1/2.
    """
    query_factor, key_factor = (torch.linalg.cholesky(_regularise(x)) for x in (query_moments, key_moments))
    left, sizes, right = torch.linalg.svd(query_factor.mT @ key_factor)
    roots = sizes.rsqrt().unsqueeze(1)
    return query_factor @ left * roots, key_factor @ right.mT * roots, sizes


def _regularise(moments: Tensor) -> Tensor:
    means = moments.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
    return moments + (RIDGE * means + FLOOR) * torch.eye(moments.shape[1], dtype=moments.dtype)
