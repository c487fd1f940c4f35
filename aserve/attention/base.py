"""What an attention backend owns: how to call its kernel, how to turn the bookkeeping of a step into
the kernel's arguments, and how to prepare capture and replay. Layers never know which one runs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

LseBase = Literal["e", "2"]
KVOrder = Literal["NHD", "HND"]  # what follows what in a page's memory: token, head, element or head, token, element


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What layers of a model may share, so that a step is planned once for all of them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What is fixed for one layer; ``kind`` is the part that other layers may share."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None  # keys seen by a query, itself included; None = all
    softcap: float | None = None
    sinks: Tensor | None = None  # [H] float32, one logit per head that joins the softmax's denominator
    kind: AttentionKind = field(init=False)

    def __post_init__(self) -> None:
        kind = AttentionKind(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.scale,
            self.sliding_window,
            self.softcap,
            self.sinks is not None,
        )
        object.__setattr__(self, "kind", kind)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The bookkeeping of one step, as host lists and as device tensors of the same content.

    Decodes stand first. T tokens, S sequences, P pages (cut to the batch's longest key).
    """

    query_lens: list[int]  # S
    key_lens: list[int]  # S, including this step's tokens
    num_decodes: int
    cu_query_lens: Tensor  # [S + 1] int32
    key_lens_device: Tensor  # [S] int32
    page_table: Tensor  # [S, P] int32
    slot_mapping: Tensor  # [T] int64: where this step's keys and values are written
    positions: Tensor  # [T] int64
    page_size: int
    cu_key_lens: Tensor | None = None  # [S + 1] int32; the very tensor cu_query_lens if nothing was computed before


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Key and value pages of one layer: [pages, page_size, KV heads, head_dim] each.

    In memory they lie as the backend's ``kv_order`` says: contiguous for NHD; for HND ``key.transpose(1, 2)`` is.
    """

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What a model on a device will ask of a backend; known at start, so that a misfit is refused there."""

    device_type: str  # "cpu" or "cuda"
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype  # of keys and values in the pool
    page_size: int
    kinds: tuple[AttentionKind, ...]  # of the model's layers, each once


class AttentionBackend(ABC):
    """Stateless between steps except for its own workspaces; keeps no reference to a batch after the step.

    It is built once for a problem that it does not refuse, and may allocate on ``device`` what every step needs and
    plan a step for each of the problem's kinds; ``forward`` finds its plan by ``spec.kind``.
    """

    name: str
    lse_base: LseBase
    kv_order: KVOrder = "NHD"  # the pool is allocated so
    offset_bits: int = 64  # width of element offsets into one layer's pages; checked against the pool's size

    def __init__(self, problem: AttentionProblem, device: torch.device) -> None:
        self.problem = problem
        self.device = device

    @classmethod
    def refuse(cls, problem: AttentionProblem) -> str | None:
        """Say why this backend cannot serve ``problem``, or None if it can."""
        return None

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare a step once for all layers; the result is passed back to ``forward``."""

    @abstractmethod
    def forward(
        self, q: Tensor, layer_kv: LayerKV, plan: Any, spec: AttentionSpec, *, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the paged pool, which already holds this step's keys and values; causal.

        q [T, H, D]. Returns the output [T, H, D] in q's dtype and, if asked for, the log-sum-exp
        [T, H] float32 in base ``lse_base`` (sinks included).
        """

    def prepare_capture(self, batch: AttentionBatch) -> Any:
        """Build a plan whose buffers keep their addresses for a graph of this batch size."""
        raise NotImplementedError(f"{self.name} does not capture")

    def prepare_replay(self, captured_plan: Any, batch: AttentionBatch) -> None:
        """Rewrite the buffers of ``captured_plan`` for ``batch``, every row of them."""
        raise NotImplementedError(f"{self.name} does not capture")

    @property
    def supports_capture(self) -> bool:
        """Whether ``prepare_capture`` and ``prepare_replay`` work."""
        return False


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
