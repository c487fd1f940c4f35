"""FlashInfer's two paged kernels for one kind of layers: how each is planned and called.

Both are taken from its modules and not from its wrappers: these copy host tensors on every plan, and rewrite a pinned
buffer whose copy may not have been made yet.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from aserve.attention.base import AttentionKind, AttentionProblem, LayerKV, Phase, common_scale
from aserve.attention.page_lists import PageLists
from aserve.errors import ConfigError

CAUSAL = 1  # flashinfer's MaskMode
NHD = 0  # flashinfer's TensorLayout
NO_POSITION_ENCODING = 0

CUDA_CORE_GROUPS = (1,)  # heads per KV head that decode without tensor cores; that kernel knows up to 4 and 8 as well


@dataclass(frozen=True, slots=True)
class Workspace:
    """Device memory that a plan divides up: ``floats`` for partial results, ``integers`` for the plan itself."""

    floats: Tensor  # uint8
    integers: Tensor  # uint8


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the host knows of N sequences behind an empty one, int32 on the host, and how to plan for them."""

    query_starts: Tensor  # [N + 2]
    page_starts: Tensor  # [N + 2]
    num_rows: int  # tokens at most
    page_size: int
    is_captured: bool  # the plan's offsets depend on the numbers of sequences and rows only
    splits_keys: bool  # between thread blocks that leave partial results


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of one forward."""

    q: Tensor
    out: Tensor
    lse: Tensor | None
    layer_kv: LayerKV


class PagedKernel(Protocol):
    """What the backend needs of a kernel."""

    def plan(self, request: PlanRequest, workspace: Workspace, staging: Tensor) -> list[int]:
        """Divide the work, write the result to ``staging`` and enqueue its copy to ``workspace.integers``."""

    def run(self, call: Call, plan: list[int], lists: PageLists, workspace: Workspace) -> None:
        """Enqueue the attention that ``plan`` divided."""


class TensorCoreKernel:
    """The prefill kernel, "fa2": any group size; a group's heads share a tile of queries."""

    def __init__(self, kind: AttentionKind, problem: AttentionProblem, *, enable_pdl: bool) -> None:
        self._kind = kind
        self._enable_pdl = enable_pdl
        self._module = _load("prefill", "fa2", *module_arguments(kind, problem), False)

    def plan(self, request: PlanRequest, workspace: Workspace, staging: Tensor) -> list[int]:
        """See PagedKernel."""
        kind = self._kind
        return list(
            self._module.plan(
                workspace.floats,
                workspace.integers,
                staging,
                request.query_starts,
                request.page_starts,
                request.page_starts,  # lengths in tokens, which this kernel does not read
                request.num_rows,
                len(request.query_starts) - 1,
                kind.num_heads,
                kind.num_kv_heads,
                request.page_size,
                request.is_captured,
                kind.head_dim,
                kind.head_dim,
                True,  # causal
                window_left(kind),
                -1,  # no fixed size of splits
                not request.splits_keys,
                0,  # no other kernel runs beside it
            )
        )

    def run(self, call: Call, plan: list[int], lists: PageLists, workspace: Workspace) -> None:
        """See PagedKernel."""
        kind, layer_kv = self._kind, call.layer_kv
        no_tensors: list[Any] = [None] * 6  # custom mask and its starts, slopes, three of multi-item scoring
        self._module.paged_run(
            workspace.floats,
            workspace.integers,
            plan,
            call.q,
            layer_kv.key,
            layer_kv.value,
            lists.query_starts,
            lists.starts,
            lists.pages,
            lists.last_page_lens,
            call.out,
            call.lse,
            CAUSAL,
            NHD,
            window_left(kind),
            self._enable_pdl,
            *no_tensors,
            kind.softcap or 0.0,
            kind.scale * common_scale(layer_kv.key_scale),
            None,  # scales of 8-bit queries, keys and values, which another kernel takes
            None,
            None,
            1.0,  # rope, which is applied before
            1e4,
            0,
            0,
        )


class CudaCoreKernel:
    """The decode kernel without tensor cores, for few heads per KV head; it has a row for every sequence."""

    def __init__(self, kind: AttentionKind, problem: AttentionProblem, *, enable_pdl: bool) -> None:
        self._kind = kind
        self._enable_pdl = enable_pdl
        self._module = _load("decode", *module_arguments(kind, problem))
        self._empty_query = torch.empty(0, dtype=problem.dtype)
        self._empty_key = torch.empty(0, dtype=problem.kv_dtype)

    def plan(self, request: PlanRequest, workspace: Workspace, staging: Tensor) -> list[int]:
        """See PagedKernel."""
        kind = self._kind
        return list(
            self._module.plan(
                workspace.floats,
                workspace.integers,
                staging,
                request.page_starts[1:],
                len(request.page_starts) - 2,
                kind.num_heads,
                kind.num_kv_heads,
                request.page_size,
                request.is_captured,
                window_left(kind),
                kind.softcap or 0.0,
                kind.head_dim,
                kind.head_dim,
                self._empty_query,
                self._empty_key,
            )
        )

    def run(self, call: Call, plan: list[int], lists: PageLists, workspace: Workspace) -> None:
        """See PagedKernel."""
        kind, layer_kv = self._kind, call.layer_kv
        self._module.run(
            workspace.floats,
            workspace.integers,
            plan,
            call.q,
            layer_kv.key,
            layer_kv.value,
            lists.starts[1:],
            lists.pages,
            lists.last_page_lens[1:],
            call.out,
            call.lse,
            NHD,
            window_left(kind),
            self._enable_pdl,
            None,  # slopes
            kind.softcap or 0.0,
            kind.scale * common_scale(layer_kv.key_scale),
            1.0,  # rope, which is applied before
            1e4,
        )


def module_arguments(kind: AttentionKind, problem: AttentionProblem) -> tuple[Any, ...]:
    """What both modules are compiled for."""
    return (
        problem.dtype,
        problem.kv_dtype,
        problem.dtype,
        torch.int32,
        kind.head_dim,
        kind.head_dim,
        NO_POSITION_ENCODING,
        kind.sliding_window is not None,
        kind.softcap is not None,
    )


def load_kernel(phase: Phase, kind: AttentionKind, problem: AttentionProblem) -> PagedKernel:
    """Return the kernel that is best for ``phase`` of ``kind``."""
    enable_pdl = problem.capability >= (9, 0)  # it starts before the previous one has ended
    if phase == "decode" and kind.num_heads // kind.num_kv_heads in CUDA_CORE_GROUPS:
        return CudaCoreKernel(kind, problem, enable_pdl=enable_pdl)
    return TensorCoreKernel(kind, problem, enable_pdl=enable_pdl)


def _load(phase: str, *arguments: Any) -> Any:
    """Return FlashInfer's module for ``arguments``, compiled if it is neither in the wheel nor in the cache."""
    library = import_module(f"flashinfer.{phase}")  # not at the top: it takes seconds
    try:
        return getattr(library, f"get_batch_{phase}_module")(*arguments)
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"attention backend 'fi': flashinfer cannot build its {phase} kernel here: {error}"
        ) from error


def splits(plan: list[int]) -> bool:
    """Whether a captured plan of either kernel splits keys between thread blocks, and so depends on their number."""
    return bool(plan[-1])


def window_left(kind: AttentionKind) -> int:
    """FlashInfer's window: keys before the query's own; -1 for all."""
    return -1 if kind.sliding_window is None else kind.sliding_window - 1
