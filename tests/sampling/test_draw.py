"""Filters against transformers' logits processors, and draws against exact probabilities."""

import numpy as np
import pytest
import torch
from doubles_sampling import CASES, Case, filters, kept_by_transformers
from torch import Tensor
from transformers import TemperatureLogitsWarper

from aserve.sampling import draw
from aserve.sampling.draw import Filters, draw_tokens, find_limit

CHI_SQUARE_999 = {3: 16.27, 7: 24.32, 9: 27.88}  # degrees of freedom -> 99.9 % quantile, from tables


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_each_filter_keeps_what_transformers_keeps(spread: float) -> None:
    """All cases stand in one batch; a flat row of 5000 tokens needs more candidates than are tried at first."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(CASES), 5000, generator=generator) * spread
    scaled = logits - logits.amax(-1, keepdim=True)
    limit = find_limit(scaled, filters(*map(list, zip(*CASES, strict=True))))  # type: ignore[arg-type]
    kept = scaled >= limit.unsqueeze(1)
    for i, (top_k, top_p, min_p) in enumerate(CASES):
        expected = kept_by_transformers(logits[i], top_k, top_p, min_p)
        assert kept[i].sum() == expected.sum(), CASES[i]
        assert torch.equal(kept[i], expected), CASES[i]


@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_has_the_limit_it_has_in_a_batch(case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    scaled = torch.randn(len(CASES), 3000, generator=generator)
    scaled -= scaled.amax(-1, keepdim=True)
    i = CASES.index(case)
    together = find_limit(scaled, filters(*map(list, zip(*CASES, strict=True))))  # type: ignore[arg-type]
    top_k, top_p, min_p = case
    alone = find_limit(scaled[i : i + 1], filters([top_k], [top_p], [min_p]))
    assert torch.equal(alone, together[i : i + 1])


def test_ties_at_a_limit_all_stay() -> None:
    scaled = torch.tensor([[-1.0, 0.0, -1.0, -1.0, -5.0]])
    limit = find_limit(scaled, filters([2], [1.0], [0.0]))
    assert (scaled >= limit).tolist() == [[True, True, True, True, False]]


def draw_many(logits: Tensor, count: int, temperature: float, chosen: Filters) -> np.ndarray:
    uniforms = torch.from_numpy(np.random.default_rng(7).random(count))
    rows = Filters(
        *(value.expand(count) for value in (chosen.top_k, chosen.top_p, chosen.min_p)),
        chosen.max_top_k,
        chosen.has_top_p,
        chosen.has_min_p,
    )
    ids = draw_tokens(logits.repeat(count, 1), uniforms, torch.full((count,), temperature), rows)
    return np.bincount(ids.numpy(), minlength=logits.shape[-1])


@pytest.mark.parametrize(
    ("temperature", "case", "freedom"),
    [(1.0, (0, 1.0, 0.0), 9), (0.5, (0, 1.0, 0.0), 9), (2.0, (8, 1.0, 0.0), 7), (1.0, (0, 0.8, 0.0), 3)],
)
def test_draws_follow_the_exact_probabilities(temperature: float, case: Case, freedom: int) -> None:
    logits = torch.tensor([[0.3, -1.0, 1.2, 0.0, 2.0, -0.5, 0.9, 1.9, -2.0, 0.4]])
    count = 20_000
    scores = TemperatureLogitsWarper(temperature)(torch.zeros(1, 1), logits)
    kept = kept_by_transformers(scores[0], *case)
    probabilities = torch.softmax(scores[0].double().masked_fill(~kept, -torch.inf), -1).numpy()
    top_k, top_p, min_p = case
    counts = draw_many(logits, count, temperature, filters([top_k], [top_p], [min_p]))
    assert counts[~kept.numpy()].sum() == 0
    expected = probabilities[kept.numpy()] * count
    assert len(expected) == freedom + 1
    assert ((counts[kept.numpy()] - expected) ** 2 / expected).sum() < CHI_SQUARE_999[freedom]


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 1000])
def test_the_drawn_token_is_where_the_cumulative_sum_passes(vocab_size: int) -> None:
    """Against numpy's own cumulative sum in float64, over block borders and at both ends."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=vocab_size).astype(np.float32)
    uniforms = np.concatenate([[0.0, 1 - 2.0**-53], rng.random(300)])
    weights = np.exp((logits - logits.max()).astype(np.float64))
    cumulative = np.cumsum(weights)
    expected = np.searchsorted(cumulative, uniforms * cumulative[-1], side="right")
    n = len(uniforms)
    got = draw_tokens(
        torch.from_numpy(logits).repeat(n, 1),
        torch.from_numpy(uniforms),
        torch.ones(n),
        filters([0] * n, [1.0] * n, [0.0] * n),
    ).numpy()
    distance = np.abs(cumulative[np.minimum(got, expected)] / cumulative[-1] - uniforms)
    assert ((got == expected) | (distance < 1e-6)).all()  # weights are float32, so borders move by that much
    assert (got == expected).mean() > 0.99


def test_masked_tokens_are_never_drawn_even_at_the_ends() -> None:
    logits = torch.full((2, 600), -torch.inf)
    logits[:, 300] = 1.0
    logits[:, 301] = 1.0
    ids = draw_tokens(
        logits,
        torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64),
        torch.ones(2),
        filters([0] * 2, [1.0] * 2, [0.0] * 2),
    )
    assert ids.tolist() == [300, 301]


@pytest.mark.parametrize("temperature", [1e-5, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4, 0.0]])
    counts = draw_many(logits, 400, temperature, filters([0], [1.0], [0.0]))
    assert counts.sum() == 400
    if temperature < 1:
        assert counts[0] == 400
    else:  # exp(-1/100) of the first
        assert 150 < counts[0] < 250


def test_top_p_does_not_sort_unless_the_nucleus_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the same with few candidates as with many."""
    generator = torch.Generator().manual_seed(3)
    scaled = torch.randn(4, 4000, generator=generator) * 3
    scaled -= scaled.amax(-1, keepdim=True)
    chosen = filters([0, 0, 10, 0], [0.5, 0.9, 0.9, 1.0], [0.0] * 4)
    wide = find_limit(scaled, chosen)
    monkeypatch.setattr(draw, "NUM_CANDIDATES", 2)
    assert torch.equal(find_limit(scaled, chosen), wide)
