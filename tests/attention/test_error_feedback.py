"""Channels paired over the halves of a key: what theory says of their moments, by linear algebra in float64."""

import pytest
import torch
from torch import Tensor

from aserve.attention.error_feedback import pair_channels


def draw(head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two balanced bases of 2 heads, and sizes of which some are far larger than the others."""
    generator = torch.Generator().manual_seed(head_dim)
    key = torch.randn(2, head_dim, head_dim, dtype=torch.float64, generator=generator)
    sizes = 10 ** (3 * torch.rand(2, head_dim, dtype=torch.float64, generator=generator) ** 3)
    return key, torch.linalg.inv(key).mT, sizes.sort(1, descending=True).values


def moments(basis: Tensor, new_basis: Tensor, sizes: Tensor) -> Tensor:
    """Return the moments in ``new_basis`` of vectors whose moments in ``basis`` are diagonal, ``sizes``."""
    change = torch.linalg.solve(basis, new_basis)
    return change.mT * sizes.unsqueeze(1) @ change


@pytest.mark.parametrize("head_dim", [64, 96])
def test_bases_stay_inverse_and_halves_cost_geometric_means(head_dim: int) -> None:
    """In each half the errors that the other leaves, and the keys, have a trace of the sum of sqrt(a b) over pairs."""
    key, query, sizes = draw(head_dim)
    half = head_dim // 2
    new_key, new_query, _ = pair_channels(key, query, sizes)
    identity = torch.eye(head_dim, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(new_key @ new_query.mT, identity, rtol=0, atol=1e-8)
    of_keys, of_queries = moments(key, new_key, sizes), moments(query, new_query, sizes)
    second = of_queries[:, half:, half:]
    across = of_queries[:, :half, half:]
    left = of_queries[:, :half, :half] - across @ torch.linalg.solve(second, across.mT)
    pairs = (sizes[:, :half] * sizes[:, half:].flip(1)).sqrt().sum(1)
    assert (pairs < sizes.sum(1) / 3).all()
    for found in (of_keys[:, :half, :half], of_keys[:, half:, half:], left, second):
        torch.testing.assert_close(found.diagonal(dim1=1, dim2=2).sum(1), pairs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("head_dim", [64, 96])
def test_the_feedback_is_the_least_squares_answer_to_an_error(head_dim: int) -> None:
    key, query, sizes = draw(head_dim)
    half = head_dim // 2
    _, new_query, feedback = pair_channels(key, query, sizes)
    errors = torch.randn(5, half, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for head in range(2):
        queries = sizes[head].sqrt().unsqueeze(1) * torch.linalg.solve(query[head], new_query[head])  # one a channel
        answer = torch.linalg.lstsq(queries[:, half:], -queries[:, :half] @ errors.T).solution
        torch.testing.assert_close(errors @ feedback[head], answer.T, rtol=1e-6, atol=1e-6)
