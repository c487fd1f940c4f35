"""Linear layers, single or merged from several checkpoint tensors that read the same input."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from aserve.layers.weighted import WeightedLayer, WeightFormat, WeightSlot


class Linear(WeightedLayer):
    """``x @ weight.T + bias``, stored and applied by the quant method.

    ``parts`` maps checkpoint names (without ".weight") to their output features, in output order: three names for a
    merged query-key-value projection. Parts wait until all have come, because a packed layout may interleave rows.
    ``arrange`` reorders the merged rows before they are packed.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Mapping[str, int],
        weights: WeightFormat,
        *,
        has_bias: bool = False,
        arrange: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(name, weights)
        self.in_features = in_features
        self.parts = dict(parts)
        self.has_bias = has_bias
        self._arrange = arrange
        self._waiting: dict[str, dict[str, Tensor]] = {"weight": {}, "bias": {}}

    @property
    def dense_weight(self) -> Tensor | None:
        """The weight [out, in] as it is, None if the quant method keeps it in another form."""
        return self.weights.method.dense_weight(self.tensors)

    @property
    def bias(self) -> Tensor | None:
        """[out], in the activations' dtype."""
        return self.tensors.get("bias")

    def __call__(self, x: Tensor) -> Tensor:
        return self.weights.method.apply(x, self.tensors, self.bias)

    def rows(self, row_ids: Tensor) -> Tensor:
        """Return rows [T, in] of the weight for ``row_ids`` [T] int64."""
        return self.weights.method.rows(self.tensors, row_ids, self.weights.dtype)

    def slots(self) -> dict[str, WeightSlot]:
        slots = {}
        for part, out_features in self.parts.items():
            shape = (out_features, self.in_features)
            slots[f"{part}.weight"] = WeightSlot(shape, partial(self._write, "weight", part))
            if self.has_bias:
                slots[f"{part}.bias"] = WeightSlot((out_features,), partial(self._write, "bias", part))
        return slots

    def _write(self, kind: str, part: str, tensor: Tensor) -> None:
        waiting = self._waiting[kind]
        waiting[part] = tensor.to(self.weights.device)
        if len(waiting) < len(self.parts):
            return
        parts = [waiting.pop(part) for part in self.parts]
        merged = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self._arrange is not None:
            merged = self._arrange(merged)
        if kind == "bias":
            self.tensors["bias"] = merged.to(self.weights.dtype, copy=True)
        else:
            self.tensors |= self.weights.method.pack(merged, self.weights.dtype)
