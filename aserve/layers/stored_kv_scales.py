"""What a checkpoint says of how its keys and values are to be scaled in pages of few bits; most say nothing."""

from functools import partial

import torch
from torch import Tensor

from aserve.attention.base import KVScales
from aserve.errors import WeightsError
from aserve.layers.weighted import WeightedLayer, WeightFormat, WeightSlot

PLACES = ("", "attn.", "{letter}_proj.")  # below the attention layer, where checkpoints keep "k_scale" and "v_scale"


class StoredKVScales(WeightedLayer):
    """The scales of one attention layer, one for all heads or one for each of ``num_kv_heads``."""

    def __init__(self, attention_name: str, num_kv_heads: int, weights: WeightFormat) -> None:
        super().__init__(f"{attention_name}.kv_scales", weights)
        self._attention_name = attention_name
        self._num_kv_heads = num_kv_heads

    @property
    def scales(self) -> KVScales | None:
        """None if the checkpoint has none. Raises WeightsError if it has those of keys or of values only."""
        if not self.tensors:
            return None
        for kind, letter in (("key", "k"), ("value", "v")):
            if kind not in self.tensors:
                raise WeightsError(f"{self._attention_name}.{letter}_scale is missing from the checkpoint")
        key, value = self.tensors["key"], self.tensors["value"]
        if len(key) == len(value) == 1:
            return KVScales(float(key), float(value))
        key, value = (scales.expand(self._num_kv_heads).contiguous() for scales in (key, value))
        return KVScales(key, value)

    def slots(self) -> dict[str, WeightSlot]:
        per_head = (self._num_kv_heads,)
        slots: dict[str, WeightSlot] = {}
        for kind, letter in (("key", "k"), ("value", "v")):
            for place in PLACES:
                name = f"{self._attention_name}.{place.format(letter=letter)}{letter}_scale"
                write = partial(self._write, kind, name)
                slots[name] = WeightSlot((), write, is_optional=True, other_shapes=((1,), per_head, (*per_head, 1, 1)))
        return slots

    def _write(self, kind: str, name: str, tensor: Tensor) -> None:
        scales = tensor.to(self.weights.device, torch.float32, copy=True).flatten()
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise WeightsError(f"tensor {name}: scales must be positive and finite, got {scales.tolist()}")
        if kind in self.tensors:
            raise WeightsError(f"tensor {name}: the checkpoint has this scale under another name, too")
        self.tensors[kind] = scales
