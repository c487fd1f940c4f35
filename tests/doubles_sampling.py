"""Independent answers for sampling tests: transformers' filters, and inverse CDFs in float64 by numpy."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from aserve.sampling.draw import Filters

Case = tuple[int, float, float]  # top_k, top_p, min_p
CASES: list[Case] = [
    (0, 1.0, 0.0), (5, 1.0, 0.0), (1, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.1, 0.0), (0, 0.9999, 0.0), (0, 1e-9, 0.0),
    (0, 1.0, 0.05), (0, 1.0, 1.0), (50, 0.5, 0.0), (50, 0.95, 0.02), (3000, 0.999, 0.001), (0, 0.6, 0.2),
]  # fmt: skip


def filters(top_k: list[int], top_p: list[float], min_p: list[float]) -> Filters:
    """Make the filters of a batch."""
    return Filters(
        torch.tensor(top_k, dtype=torch.float32),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(min_p, dtype=torch.float32),
        max(top_k),
        min(top_p) < 1,
        max(min_p) > 0,
    )


def kept_by_transformers(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens of one row [V] its warpers leave, in the order that ``generate`` applies them."""
    scores = logits.unsqueeze(0).clone()
    ids = torch.zeros(1, 1, dtype=torch.long)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    return torch.isfinite(scores[0])


def assert_inverts_cdf(
    token_ids: Tensor, logits: Tensor, uniforms: Tensor, temperatures: Tensor, kept: NDArray[np.bool_] | None = None
) -> None:
    """Each row's token is where the cumulative weight passes its uniform, unless that is 1e-6 from a border.

    Rows of temperature 0 hold the lowest best id.
    """
    num_exact = 0
    for i, token_id in enumerate(token_ids.tolist()):
        row = logits[i].double().cpu().numpy()
        temperature, uniform = float(temperatures[i]), float(uniforms[i])
        expected = int(row.argmax())
        if temperature > 0:
            weights = np.exp((row - row.max()) / temperature)
            if kept is not None:
                weights[~kept[i]] = 0.0
            shares = np.cumsum(weights) / weights.sum()
            expected = min(int(np.searchsorted(shares, uniform, side="right")), int(np.flatnonzero(weights)[-1]))
            if weights[token_id] > 0 and abs(shares[min(token_id, expected)] - uniform) < 1e-6:
                num_exact += token_id == expected
                continue
        assert token_id == expected, (i, temperature, uniform)
        num_exact += 1
    assert num_exact >= 0.9 * len(token_ids)
