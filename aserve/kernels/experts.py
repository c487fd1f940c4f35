"""Mixtures of experts: what operators see of one, which experts a token takes, and their sum in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts a token takes: the ``experts_per_token`` with the highest scores.

    Their weights are the softmax of the scores, over those taken if ``is_renormalised``, else over all experts.
    """

    num_experts: int
    experts_per_token: int
    is_renormalised: bool


@dataclass(frozen=True, slots=True)
class SwiGlu:
    """How gate and up projection are joined: gate * sigmoid(alpha * gate) * (up + up_offset).

    With a ``limit`` gates are cut above it before, and up projections at it on both sides. The defaults are SiLU's.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Join gate_up [T, 2 * I], the gate first, to [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.up_offset)


SILU = SwiGlu()


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """The weights of E experts in the activations' dtype; the rows of a gate_up are the gate's, then the up part's."""

    gate_up: Tensor  # [E, 2 * I, hidden]
    down: Tensor  # [E, hidden, I]
    gate_up_bias: Tensor | None = None  # [E, 2 * I]
    down_bias: Tensor | None = None  # [E, hidden]


class Experts(Protocol):
    """The experts of one layer, as operators see them."""

    @property
    def routing(self) -> Routing: ...

    @property
    def swiglu(self) -> SwiGlu: ...

    @property
    def dense_weights(self) -> DenseExperts | None:
        """The weights as they are, None if the quant method keeps them in another form."""

    def gate_up(self, x: Tensor, expert: int) -> Tensor:
        """Return [T, 2 * I] of one expert; x [T, hidden]."""

    def down(self, x: Tensor, expert: int) -> Tensor:
        """Return [T, hidden] of one expert; x [T, I]."""


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The k experts of each token, best first."""

    expert_ids: Tensor  # [T, k] int64
    weights: Tensor  # [T, k] float32


def choose_experts(scores: Tensor, routing: Routing) -> ExpertChoice:
    """Choose by the router's ``scores`` [T, E], before any softmax."""
    scores = scores.float()
    chosen, expert_ids = scores.topk(routing.experts_per_token, dim=-1)
    if routing.is_renormalised:
        return ExpertChoice(expert_ids, chosen.softmax(dim=-1))
    return ExpertChoice(expert_ids, (chosen - scores.logsumexp(dim=-1, keepdim=True)).exp())


def sum_by_expert(x: Tensor, choice: ExpertChoice, num_experts: int, apply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the weighted sum of what ``apply`` makes of x [T, hidden] with each token's experts.

    One call an expert, with the tokens that take it. The counts are read on the host.
    """
    experts_per_token = choice.expert_ids.shape[1]
    expert_ids = choice.expert_ids.flatten()
    order = expert_ids.argsort(stable=True)
    token_ids, weights = order // experts_per_token, choice.weights.flatten()[order].unsqueeze(1)
    total, start = torch.zeros_like(x, dtype=torch.float32), 0
    for expert, count in enumerate(expert_ids.bincount(minlength=num_experts).tolist()):
        if count:
            own = slice(start, start + count)
            total.index_add_(0, token_ids[own], apply(x[token_ids[own]], expert).float() * weights[own])
            start += count
    return total.to(x.dtype)


def sum_all_experts(
    x: Tensor, choice: ExpertChoice, num_experts: int, apply: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return the same without reading anything on the host: every expert is applied to every token.

    What an expert makes of a token that does not take it counts for nothing, be it infinite.
    """
    weights = torch.zeros(len(x), num_experts, dtype=torch.float32, device=x.device)
    weights.scatter_(1, choice.expert_ids, choice.weights)
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(num_experts):
        weight = weights[:, expert : expert + 1]
        total += (apply(x, expert).float() * weight).masked_fill_(weight == 0, 0.0)
    return total.to(x.dtype)
