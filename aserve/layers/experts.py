"""The experts of one layer, each a gated feed-forward block, kept together."""

from functools import partial

import torch
from torch import Tensor

from aserve.kernels.experts import SILU, DenseExperts, Routing, SwiGlu
from aserve.layers.weighted import WeightedLayer, WeightFormat, WeightSlot

GATE_UP, DOWN = "gate_up", "down"


class Experts(WeightedLayer):
    """What the quant method makes of each expert's two weights, side by side: "gate_up.weight" [E, ...] and so on.

    A checkpoint holds the projections of each expert, or those of all in two tensors: [E, out, in] with the gate first,
    or, ``is_interleaved``, [E, in, out] with gate and up part by turns. A bias, if there is one, is "gate_up_bias"
    [E, 2 * I] or "down_bias" [E, hidden], in the activations' dtype.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        routing: Routing,
        weights: WeightFormat,
        *,
        swiglu: SwiGlu = SILU,
        has_bias: bool = False,
        is_interleaved: bool = False,
    ) -> None:
        super().__init__(name, weights)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.routing = routing
        self.swiglu = swiglu
        self._has_bias = has_bias
        self._is_interleaved = is_interleaved
        self._waiting: dict[int, dict[str, Tensor]] = {}

    @property
    def dense_weights(self) -> DenseExperts | None:
        """The weights as they are, None if the quant method keeps them in another form."""
        gate_up = self.weights.method.dense_weight(self._packed(GATE_UP))
        down = self.weights.method.dense_weight(self._packed(DOWN))
        if gate_up is None or down is None:
            return None
        return DenseExperts(gate_up, down, self.tensors.get(f"{GATE_UP}_bias"), self.tensors.get(f"{DOWN}_bias"))

    def gate_up(self, x: Tensor, expert: int) -> Tensor:
        """Return [T, 2 * I] of one expert; x [T, hidden]."""
        return self._apply(GATE_UP, x, expert)

    def down(self, x: Tensor, expert: int) -> Tensor:
        """Return [T, hidden] of one expert; x [T, I]."""
        return self._apply(DOWN, x, expert)

    def slots(self) -> dict[str, WeightSlot]:
        slots = self._joint_slots() if self._is_interleaved else self._separate_slots()
        if self._has_bias:
            num_experts = self.routing.num_experts
            for kind, size in ((GATE_UP, 2 * self.intermediate_size), (DOWN, self.hidden_size)):
                slot = WeightSlot((num_experts, size), partial(self._write_bias, kind))
                slots[f"{self.name}.{kind}_proj_bias"] = slot
        return slots

    def _joint_slots(self) -> dict[str, WeightSlot]:
        hidden, inner, num_experts = self.hidden_size, self.intermediate_size, self.routing.num_experts
        return {
            f"{self.name}.{kind}_proj": WeightSlot((num_experts, *shape), partial(self._store_transposed, kind))
            for kind, shape in ((GATE_UP, (hidden, 2 * inner)), (DOWN, (inner, hidden)))
        }

    def _separate_slots(self) -> dict[str, WeightSlot]:
        hidden, inner, num_experts = self.hidden_size, self.intermediate_size, self.routing.num_experts
        slots, merged = {}, list[str]()
        for expert in range(num_experts):
            for part in ("gate_proj", "up_proj"):
                name = f"{self.name}.{expert}.{part}.weight"
                slots[name] = WeightSlot((inner, hidden), partial(self._write_part, expert, part))
                merged.append(name)
        downs = [f"{self.name}.{expert}.down_proj.weight" for expert in range(num_experts)]
        for expert, name in enumerate(downs):
            slots[name] = WeightSlot((hidden, inner), partial(self._store, DOWN, expert))
        slots[f"{self.name}.gate_up_proj"] = WeightSlot(
            (num_experts, 2 * inner, hidden), partial(self._store_all, GATE_UP), is_optional=True, covers=tuple(merged)
        )
        slots[f"{self.name}.down_proj"] = WeightSlot(
            (num_experts, hidden, inner), partial(self._store_all, DOWN), is_optional=True, covers=tuple(downs)
        )
        return slots

    def _write_part(self, expert: int, part: str, weight: Tensor) -> None:
        waiting = self._waiting.setdefault(expert, {})
        waiting[part] = weight.to(self.weights.device)
        if len(waiting) == 2:
            self._store(GATE_UP, expert, torch.cat([waiting["gate_proj"], waiting["up_proj"]]))
            del self._waiting[expert]

    def _store_all(self, kind: str, weights: Tensor) -> None:
        for expert, weight in enumerate(weights):
            self._store(kind, expert, weight)

    def _store_transposed(self, kind: str, weights: Tensor) -> None:
        for expert, weight in enumerate(weights):
            rows = weight.to(self.weights.device).T
            self._store(kind, expert, _gate_first(rows) if kind == GATE_UP else rows.contiguous())

    def _write_bias(self, kind: str, bias: Tensor) -> None:
        arranged = _gate_first(bias.T).T if kind == GATE_UP and self._is_interleaved else bias
        self.tensors[f"{kind}_bias"] = arranged.to(self.weights.device, self.weights.dtype, copy=True).contiguous()

    def _store(self, kind: str, expert: int, weight: Tensor) -> None:
        """Pack one expert's ``weight`` [out, in] into its place among the others."""
        packed = self.weights.method.pack(weight.to(self.weights.device), self.weights.dtype)
        for key, tensor in packed.items():
            name = f"{kind}.{key}"
            if name not in self.tensors:
                self.tensors[name] = tensor.new_empty((self.routing.num_experts, *tensor.shape))
            self.tensors[name][expert] = tensor

    def _apply(self, kind: str, x: Tensor, expert: int) -> Tensor:
        packed = {key: tensor[expert] for key, tensor in self._packed(kind).items()}
        bias = self.tensors.get(f"{kind}_bias")
        return self.weights.method.apply(x, packed, None if bias is None else bias[expert])

    def _packed(self, kind: str) -> dict[str, Tensor]:
        prefix = f"{kind}."
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}


def _gate_first(rows: Tensor) -> Tensor:
    """Return the even ``rows`` of [2 * I, ...], which are the gate's, before the odd ones."""
    return torch.cat((rows[0::2], rows[1::2]))
