"""The experts of a built-in model's layer, with weights to time them on a GPU."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.builtin_models import BUILTIN_MODELS
from aserve.kernels.experts import SILU, DenseExperts, Routing, SwiGlu
from aserve.kernels.gpu.moe import run_moe
from aserve.kernels.gpu.moe_launch import MoeLaunch
from aserve.kernels.gpu.replay_timer import time_calls
from aserve.kernels.operators import Operators

DTYPE = torch.bfloat16
NUM_DRAWS = 8  # of tokens, whose experts come from memory in turn
MAX_ERROR = 0.01  # of the norm, between two results rounded to the activations' dtype


def find_routing(model: str) -> Routing | None:
    """Return how a built-in model's router chooses, None if it has none."""
    config = BUILTIN_MODELS[model]
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    return Routing(num_experts, config["num_experts_per_tok"], True) if num_experts else None


@dataclass(frozen=True, slots=True)
class DrawnExperts:
    """Experts with weights that were never trained."""

    routing: Routing
    dense_weights: DenseExperts
    swiglu: SwiGlu = SILU

    def gate_up(self, x: Tensor, expert: int) -> Tensor:
        """Return [T, 2 * I] of one expert."""
        return F.linear(x, self.dense_weights.gate_up[expert])

    def down(self, x: Tensor, expert: int) -> Tensor:
        """Return [T, hidden] of one expert."""
        return F.linear(x, self.dense_weights.down[expert])


class MoeCase:
    """One layer's experts, without biases, and a router that takes each as often as any other."""

    def __init__(self, model: str, routing: Routing, device: torch.device, overlap: bool) -> None:
        config = BUILTIN_MODELS[model]
        self._hidden: int = config["hidden_size"]
        self._inner: int = config.get("moe_intermediate_size") or config["intermediate_size"]
        self._overlap = overlap
        num_experts = routing.num_experts
        draw = partial(torch.randn, device=device, dtype=DTYPE)
        gate_up = draw(num_experts, 2 * self._inner, self._hidden).mul_(self._hidden**-0.5)
        down = draw(num_experts, self._hidden, self._inner).mul_(self._inner**-0.5)
        self._experts = DrawnExperts(routing, DenseExperts(gate_up, down))

    def time_launch(self, num_tokens: int, launch: MoeLaunch | None) -> float:
        """Return the microseconds of all kernels, None launches as the engine would; fail if they are wrong."""
        draws = self._draw(num_tokens)
        self._check(*draws[0], launch)
        return time_calls([partial(run_moe, x, scores, self._experts, self._overlap, launch) for x, scores in draws])

    def bandwidth(self, num_tokens: int, time_us: float) -> float:
        """Return GB/s of the weights of those experts that any token takes."""
        routing = self._experts.routing
        taken: list[int] = [
            scores.topk(routing.experts_per_token).indices.unique().numel() for _, scores in self._draw(num_tokens)
        ]
        return sum(taken) / len(taken) * 3 * self._hidden * self._inner * DTYPE.itemsize / time_us / 1e3

    def rate(self, num_tokens: int, time_us: float) -> float:
        """Return TFLOP/s."""
        return 6 * num_tokens * self._experts.routing.experts_per_token * self._hidden * self._inner / time_us / 1e6

    def _check(self, x: Tensor, scores: Tensor, launch: MoeLaunch | None) -> None:
        actual = run_moe(x, scores, self._experts, self._overlap, launch).float()
        expected = Operators().moe(x, scores, self._experts).float()
        error = float((actual - expected).norm() / expected.norm())
        if not error < MAX_ERROR:
            raise ArithmeticError(f"{launch} is wrong by {error:.1e} for {len(x)} tokens")

    def _draw(self, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Return (x [T, hidden], scores [T, E]), the same each time."""
        device = self._experts.dense_weights.down.device
        generator = torch.Generator(device)
        generator.manual_seed(num_tokens)
        draw = partial(torch.randn, num_tokens, device=device, generator=generator)
        return [(draw(self._hidden, dtype=DTYPE), draw(self._experts.routing.num_experts)) for _ in range(NUM_DRAWS)]
