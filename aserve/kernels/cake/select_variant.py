"""From what a model asks to the variant of a kernel that serves it, and why the faster ones do not."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

FP8_CAPABILITY = (8, 9)  # the least that converts e4m3


class Variant(Protocol):
    """What rows of all tables say."""

    @property
    def name(self) -> str:
        """Unique in its table."""

    @property
    def dtypes(self) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
        """Of queries and of keys and values."""

    @property
    def head_dims(self) -> range | tuple[int, ...]:
        """Elements of a head."""

    @property
    def max_group(self) -> int:
        """Query heads of a KV head."""

    @property
    def writes_lse(self) -> bool:
        """Whether a log-sum-exp is left where one is asked for."""


V = TypeVar("V", bound=Variant)


@dataclass(frozen=True, slots=True)
class VariantProblem:
    """What decides on a variant."""

    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype
    head_dim: int
    group: int  # query heads of a KV head
    capability: tuple[int, int]  # of the GPU
    return_lse: bool = False


@dataclass(frozen=True, slots=True)
class Choice(Generic[V]):
    """The first row that serves a problem, None if none does, and the reasons of those before."""

    variant: V | None
    refusals: dict[str, str]  # by the name of the row


def select_variant(problem: VariantProblem, variants: tuple[V, ...]) -> Choice[V]:
    """Go through ``variants``, the fastest first."""
    refusals: dict[str, str] = {}
    for variant in variants:
        reason = refuse_variant(variant, problem)
        if reason is None:
            return Choice(variant, refusals)
        refusals[variant.name] = reason
    return Choice(None, refusals)


def refuse_variant(variant: Variant, problem: VariantProblem) -> str | None:
    """Say why ``variant`` does not serve ``problem``, or None if it does."""
    if (problem.dtype, problem.kv_dtype) not in variant.dtypes:
        return f"it does not read {_name(problem.kv_dtype)} with queries in {_name(problem.dtype)}"
    if problem.kv_dtype.itemsize == 1 and problem.capability < FP8_CAPABILITY:
        wanted, found = (".".join(map(str, version)) for version in (FP8_CAPABILITY, problem.capability))
        return f"{_name(problem.kv_dtype)} needs a GPU of compute capability {wanted} or more, not {found}"
    if problem.head_dim not in variant.head_dims:
        return f"it knows head_dim {_list(variant.head_dims)}, not {problem.head_dim}"
    if problem.group > variant.max_group:
        return f"it serves up to {variant.max_group} heads per KV head, not {problem.group}"
    if problem.return_lse and not variant.writes_lse:
        return "it leaves no log-sum-exp"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(numbers: range | tuple[int, ...]) -> str:
    if isinstance(numbers, range):
        return f"{numbers.start} to {numbers.stop - 1}"
    return ", ".join(map(str, numbers))
