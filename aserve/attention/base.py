"""What an attention backend owns: how to call its kernel, how to turn the bookkeeping of a step into
the kernel's arguments, and how to prepare capture and replay. Layers never know which one runs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.kernels.key_transform import KeyTransform
from aserve.kernels.nvfp4 import NVFP4, BlockScales

LseBase = Literal["e", "2"]
Phase = Literal["prefill", "decode"]  # chunks of prompts, or one token of each sequence
PHASES: tuple[Phase, ...] = ("prefill", "decode")
DecodeOrder = Literal["longest first", "long and short"]  # by the keys of sequences; the latter takes them in turn
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
    page_size: int
    cu_key_lens: Tensor | None = None  # [S + 1] int32; the very tensor cu_query_lens if nothing was computed before


@dataclass(frozen=True, slots=True)
class CaptureShape:
    """The padded size of a forward that a graph captures; a step of any smaller size is replayed in it.

    The T tokens begin with the step's real decodes, then come its chunks, then padding. A graph of decodes alone has
    no chunks and as many tokens as decodes. In a mixed graph the decode section covers the first ``num_decodes``
    tokens even if some of them belong to chunks: what it writes there, the chunk section overwrites.
    """

    num_tokens: int  # T
    num_decodes: int  # D
    num_chunks: int  # C


@dataclass(frozen=True, slots=True)
class StepTables:
    """Device tensors that stay in place; captured forwards read them, the runner rewrites them whole for each step.

    A padding decode has the dummy row and one key, a padding chunk the dummy row, no query and no key.
    """

    page_table: Tensor  # [rows + 1, W] int32: of every row that may run, the dummy row last
    rows: Tensor  # [D + C] int32, into page_table: decodes first
    key_lens: Tensor  # [D + C] int32
    cu_query_lens: Tensor  # [C + 1] int32: the token at which each chunk starts; begins with the number of real decodes
    page_size: int

    def section(self, start: int, stop: int) -> "StepTables":
        """Return the tables of sequences ``start .. stop - 1``, which are decodes only or chunks only."""
        rows, key_lens = self.rows[start:stop], self.key_lens[start:stop]
        return StepTables(self.page_table, rows, key_lens, self.cu_query_lens, self.page_size)


@dataclass(frozen=True, slots=True)
class StepLens:
    """What the host knows of a padded step; the content of the tables' tensors of the same names."""

    key_lens: NDArray[np.int32]  # [D + C]
    cu_query_lens: NDArray[np.int32]  # [C + 1]


@dataclass(frozen=True, slots=True)
class KVScales:
    """What keys and values in pages of 8 or 4 bits are to be multiplied with.

    Numbers for the whole layer, or float32 [KV heads] on its device. Keys may be transformed before they are divided.
    """

    key: float | Tensor = 1.0
    value: float | Tensor = 1.0
    key_transform: KeyTransform | None = None

    @property
    def are_per_head(self) -> bool:
        """Whether heads of a layer differ."""
        return isinstance(self.key, Tensor)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Key and value pages of one layer: [pages, page_size, KV heads, head_dim] each, half as wide in nvfp4.

    In memory they lie as the backend's ``kv_order`` says: contiguous for NHD; for HND ``key.transpose(1, 2)`` is.
    Pages of 8 or 4 bits hold keys divided by ``key_scale`` and values divided by ``value_scale``; see ``KVScales``.
    Where keys are transformed, a backend is handed queries that are, too.
    """

    key: Tensor
    value: Tensor
    key_scale: float | Tensor = 1.0
    value_scale: float | Tensor = 1.0
    block_scales: BlockScales | None = None  # of nvfp4
    key_transform: KeyTransform | None = None


def common_scale(scale: float | Tensor) -> float:
    """Return a scale that all heads of a layer share. Raises ValueError for scales per head."""
    if isinstance(scale, Tensor):
        raise ValueError("scale: one for all heads of a layer is wanted, not one for each")
    return scale


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What a model on a device will ask of a backend; known at start, so that a misfit is refused there."""

    device_type: str  # "cpu" or "cuda"
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype  # of keys and values in the pool; NVFP4 names that format
    page_size: int
    kinds: tuple[AttentionKind, ...]  # of the model's layers, each once
    capability: tuple[int, int] = (0, 0)  # of a CUDA device: (9, 0) is Hopper
    gpu_name: str = ""  # of a CUDA device: "NVIDIA H200"
    cake_variants: tuple[str, ...] = ()  # of the backend cake, that must be used for their phases
    max_drafts: int = 0  # tokens guessed ahead of a sequence, at most; it and they are a chunk where they are verified
    max_num_seqs: int = 320  # of one step
    max_num_tokens: int = 8192  # of one step
    max_model_len: int = 8192  # of a sequence, in tokens
    needs_lse: bool = False  # whether layers are asked for the log-sum-exp
    has_head_scales: bool = False  # the scales of keys and values differ by KV head


class AttentionBackend(ABC):
    """Stateless between steps except for its own workspaces; keeps no reference to a batch after the step.

    It is built once for a problem that it does not refuse in the ``phases`` that it is to serve, and may allocate on
    ``device`` what every step needs and plan a step for each of the problem's kinds; ``forward`` finds its plan by
    ``spec.kind``.
    """

    name: str
    lse_base: LseBase
    kv_order: KVOrder = "NHD"  # the pool is allocated so
    reads_any_order: bool = False  # the other one too, for the sake of a backend that it is paired with
    decode_order: DecodeOrder = "longest first"  # since blocks start in order, and the last should be quick to end
    offset_bits: int = 64  # width of element offsets into one layer's pages; checked against the pool's size

    def __init__(self, problem: AttentionProblem, device: torch.device, phases: tuple[Phase, ...] = PHASES) -> None:
        self.problem = problem
        self.device = device
        self.phases = phases

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        """Say why this backend cannot serve ``phase`` of ``problem``, or None if it can."""
        return None

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare a step once for all layers; the result is passed back to ``forward``."""

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: Any,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the paged pool, which already holds this step's keys and values; causal.

        q [T, H, D]. Returns the output [T, H, D] in q's dtype, in ``out`` if that is given, and, if asked for, the
        log-sum-exp [T, H] float32 in base ``lse_base`` (sinks included). Rows of tokens that belong to no sequence of
        the plan are left as they are in ``out``.
        """

    def kernel_name(self, plan: Any, spec: AttentionSpec) -> str:
        """Return which of its kernels serves a layer of a planned step; empty if the backend does not choose."""
        return ""

    @property
    def captures_decodes(self) -> bool:
        """Whether a graph may hold this backend's attention over a batch of decodes."""
        return False

    @property
    def captures_chunks(self) -> bool:
        """Whether a graph may hold this backend's attention over prefill chunks, beside decodes or alone."""
        return False

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> Any:
        """Return a plan for ``forward`` whose buffers keep their addresses; ``tables`` are those of every replay.

        A plan for chunks alone (``num_decodes`` 0) still finds its first query at ``cu_query_lens[0]``.
        """
        raise NotImplementedError(f"{self.name} does not capture")

    def convert(self, plan: Any) -> None:  # noqa: B027 - most have nothing to convert
        """Enqueue what turns the tables into the kernel's arguments; captured once, ahead of the first layer."""

    def prepare_replay(self, plan: Any, lens: StepLens) -> None:  # noqa: B027 - most plan on the device
        """Plan on the host for the step that is replayed next.

        What it writes to the device goes through the current stream, so an earlier replay has read it before.
        """


def refuse_device(problem: AttentionProblem, min_capability: tuple[int, int] = (0, 0)) -> str | None:
    """Say why kernels for CUDA devices of ``min_capability`` and more cannot serve ``problem``."""
    if problem.device_type != "cuda":
        return f"it runs on a CUDA device only, not on {problem.device_type}"
    if problem.capability < min_capability:
        least, found = capability_name(min_capability), capability_name(problem.capability)
        return f"it needs a GPU of compute capability {least} or more, not {found}"
    return None


def capability_name(capability: tuple[int, int]) -> str:
    """'9.0' for (9, 0)."""
    return f"{capability[0]}.{capability[1]}"


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16, 'nvfp4' for what names that format."""
    return "nvfp4" if dtype == NVFP4 else str(dtype).removeprefix("torch.")
