"""What a model's forward pass needs to know of the step: an argument of every layer, never global."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aserve.attention.base import AttentionBackend, LayerKV
from aserve.kernels.operators import Operators


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step, as the layers see it."""

    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: where the tokens' keys and values are written
    backend: AttentionBackend
    plan: Any  # the backend's own, of this step
    layers_kv: list[LayerKV]  # one per layer
    operators: Operators
