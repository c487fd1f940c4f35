"""Experts with plain weights, and what a mixture of them should give, in float64 and token by token."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.kernels.experts import SILU, DenseExperts, Routing, SwiGlu


@dataclass(frozen=True)
class PlainExperts:
    """As the unquantised layer would offer them."""

    routing: Routing
    dense_weights: DenseExperts
    swiglu: SwiGlu = SILU

    def gate_up(self, x: Tensor, expert: int) -> Tensor:
        weights = self.dense_weights
        return F.linear(x, weights.gate_up[expert], _row(weights.gate_up_bias, expert))

    def down(self, x: Tensor, expert: int) -> Tensor:
        weights = self.dense_weights
        return F.linear(x, weights.down[expert], _row(weights.down_bias, expert))


@dataclass(frozen=True)
class ExpertsCase:
    """Sizes of a mixture; ``has_gpt_oss_form``: with biases, clamps and an offset."""

    num_experts: int
    experts_per_token: int
    hidden_size: int
    intermediate_size: int
    is_renormalised: bool = True
    has_gpt_oss_form: bool = False

    def draw(self, dtype: torch.dtype, device: torch.device) -> PlainExperts:
        """Draw weights that keep the size of what they multiply; gates and up parts reach beyond the clamps."""
        num_experts, hidden, inner = self.num_experts, self.hidden_size, self.intermediate_size
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int, scale: float) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

        has_bias = self.has_gpt_oss_form
        weights = DenseExperts(
            normal(num_experts, 2 * inner, hidden, scale=(3.0 if has_bias else 1.0) * hidden**-0.5),
            normal(num_experts, hidden, inner, scale=inner**-0.5),
            normal(num_experts, 2 * inner, scale=2.0) if has_bias else None,
            normal(num_experts, hidden, scale=1.0) if has_bias else None,
        )
        routing = Routing(num_experts, self.experts_per_token, self.is_renormalised)
        return PlainExperts(routing, weights, SwiGlu(1.702, 7.0, 1.0) if has_bias else SILU)

    def draw_inputs(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draw (x [T, hidden], scores [T, E]); no two scores of a token are equal."""
        generator = torch.Generator().manual_seed(num_tokens)
        x = torch.randn(num_tokens, self.hidden_size, generator=generator)
        ranks = torch.stack([torch.randperm(self.num_experts, generator=generator) for _ in range(num_tokens)])
        return x.to(device, dtype), (ranks * 0.125 - 1).to(device, dtype)  # exact in 16 bits up to 256 experts


def moe64(x: Tensor, scores: Tensor, experts: PlainExperts) -> Tensor:
    """Return [T, hidden] in float64: the definition, with probabilities of all experts that may be scaled to one."""
    routing, rows = experts.routing, []
    for row, row_scores in zip(x.double(), scores.double(), strict=True):
        probabilities = row_scores.softmax(dim=0)
        best = sorted(range(routing.num_experts), key=lambda expert: -float(row_scores[expert]))
        chosen = best[: routing.experts_per_token]
        share = float(probabilities[chosen].sum()) if routing.is_renormalised else 1.0
        rows.append(sum(probabilities[expert] / share * _expert64(row, experts, expert) for expert in chosen))
    return torch.stack(rows)


def _expert64(x: Tensor, experts: PlainExperts, expert: int) -> Tensor:
    weights, swiglu = experts.dense_weights, experts.swiglu
    gate_up = weights.gate_up[expert].double() @ x
    if weights.gate_up_bias is not None:
        gate_up += weights.gate_up_bias[expert].double()
    gate, up = gate_up[: len(gate_up) // 2], gate_up[len(gate_up) // 2 :]
    if swiglu.limit is not None:
        gate, up = gate.clamp(max=swiglu.limit), up.clamp(min=-swiglu.limit, max=swiglu.limit)
    hidden = gate / (1 + torch.exp(-swiglu.alpha * gate)) * (up + swiglu.up_offset)
    result = weights.down[expert].double() @ hidden
    return result if weights.down_bias is None else result + weights.down_bias[expert].double()


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
