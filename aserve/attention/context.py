"""What a model's forward pass needs to know of the step: an argument of every layer, never global."""

from dataclasses import dataclass
from typing import Any

from aserve.attention.base import AttentionBackend, AttentionBatch, LayerKV
from aserve.kernels.operators import Operators


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step, as the layers see it."""

    batch: AttentionBatch
    backend: AttentionBackend
    plan: Any  # what backend.plan(batch) returned
    layers_kv: list[LayerKV]  # one per layer
    operators: Operators
