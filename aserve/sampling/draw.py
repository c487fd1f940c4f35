"""From logits to one token each: temperature, top-k, top-p, min-p, inverse CDF. Each row is computed alone."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

NUM_CANDIDATES = 1024  # most likely tokens tried first for top-p; a wider nucleus costs a full sort
BLOCK = 256  # tokens summed at once on the way to the drawn one


class FilterValues(NamedTuple):
    """Which tokens may be drawn, per row [N] float32: top_k 0, top_p 1 and min_p 0 are off."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """The same, with the host's knowledge of the rows beside it, so that nothing waits for the device to ask."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    max_top_k: int
    has_top_p: bool
    has_min_p: bool


def draw_tokens(logits: Tensor, uniforms: Tensor, temperature: Tensor, filters: Filters) -> Tensor:
    """Draw one token id [N] int64 from each row of ``logits`` [N, V] float32, which are overwritten.

    ``uniforms`` [N] float64 in [0, 1); ``temperature`` [N] float32, above 0. Filters apply in the order top-k, top-p
    (of what top-k left), min-p; tokens that tie at a limit all stay.
    """
    scaled = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature.unsqueeze(1))  # the best stands at 0
    if not (filters.max_top_k or filters.has_top_p or filters.has_min_p):
        return _invert_cdf(scaled.exp_(), uniforms)
    is_cut = scaled < find_limit(scaled, filters).unsqueeze(1)
    return _invert_cdf(scaled.exp_().masked_fill_(is_cut, 0.0), uniforms)


def find_limit(scaled: Tensor, filters: Filters) -> Tensor:
    """Return [N]: the smallest of the ``scaled`` logits [N, V] (best at 0) that passes all filters."""
    limit = torch.log(filters.min_p)  # relative to the best; -inf if off
    if filters.max_top_k == 0 and not filters.has_top_p:
        return limit
    vocab_size = scaled.shape[1]
    num_candidates = filters.max_top_k
    if filters.has_top_p:  # a sort is quick on a GPU, and asking whether the candidates were enough is not
        num_candidates = vocab_size if scaled.is_cuda else max(num_candidates, NUM_CANDIDATES)
    num_candidates = min(num_candidates, vocab_size)
    candidates = scaled.topk(num_candidates, -1).values
    has_top_k = filters.top_k > 0
    kth = candidates.gather(1, filters.top_k.long().clamp(1, num_candidates).unsqueeze(1) - 1).squeeze(1)
    limit = torch.where(has_top_k, torch.maximum(limit, kth), limit)
    if not filters.has_top_p:
        return limit
    nucleus, is_complete = _find_nucleus(scaled, candidates, filters)
    if num_candidates < vocab_size and not bool(is_complete.all()):
        nucleus, _ = _find_nucleus(scaled, scaled.sort(-1, descending=True).values, filters)
    return torch.maximum(limit, nucleus)


def _find_nucleus(scaled: Tensor, candidates: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Find the last of the ``candidates`` [N, C] (best first) that is needed to reach top_p of the mass.

    The mass is that of the candidates that top_k keeps, or else of the whole row. Returns the logits of those last
    candidates [N], -inf without top_p, and whether each row got there [N].
    """
    num_candidates = candidates.shape[1]
    has_top_k, has_top_p = filters.top_k > 0, filters.top_p < 1
    num_kept = torch.where(has_top_k, filters.top_k, num_candidates).unsqueeze(1)
    is_kept = torch.arange(num_candidates, device=scaled.device) < num_kept
    sums = torch.cumsum(candidates.exp() * is_kept, -1, dtype=torch.float64)
    mass = torch.where(has_top_k, sums[:, -1], scaled.exp().sum(-1, dtype=torch.float64))
    last = (sums < (filters.top_p * mass).unsqueeze(1)).sum(-1)
    nucleus = candidates.gather(1, last.clamp(max=num_candidates - 1).unsqueeze(1)).squeeze(1)
    return torch.where(has_top_p, nucleus, -torch.inf), (last < num_candidates) | ~has_top_p


def _invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token of each row [N, V] whose cumulative weight passes ``uniforms`` [N] of the total."""
    num_rows, vocab_size = weights.shape
    blocks = F.pad(weights, (0, -vocab_size % BLOCK)).view(num_rows, -1, BLOCK)
    block_sums = torch.cumsum(blocks.sum(-1, dtype=torch.float64), -1)
    target = (uniforms * block_sums[:, -1]).unsqueeze(1)
    block = torch.searchsorted(block_sums, target, right=True)  # [N, 1]
    block.clamp_(max=blocks.shape[1] - 1)  # a row of NaN finds none; its result is not used
    before = F.pad(block_sums, (1, 0)).gather(1, block)
    inside = torch.cumsum(
        blocks.gather(1, block.unsqueeze(2).expand(-1, -1, BLOCK)).squeeze(1), -1, dtype=torch.float64
    )
    # The two sums of a block may round apart: what is left stays below the block's own, so a token is found.
    left = torch.minimum(target - before, inside[:, -1:] * (1 - 2.0**-52))
    return (block * BLOCK + torch.searchsorted(inside, left, right=True)).squeeze(1)
