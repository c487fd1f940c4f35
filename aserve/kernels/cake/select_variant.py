"""From what a model asks to the variant of a kernel that serves it, and why the faster ones do not."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Generic, TypeVar

import torch

from aserve.kernels.cake.architectures import SHARED_BYTES, refuse_architecture
from aserve.kernels.cake.variant import UNBOUNDED, Variant
from aserve.kernels.nvfp4 import HEAD_GRAIN, NVFP4, element_bytes

FP8_CAPABILITY = (8, 9)  # the least that converts e4m3, in which nvfp4 has its scales


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
    num_queries: int = 1  # of a sequence, at most
    max_keys: int = UNBOUNDED  # that a query sees
    max_seqs: int = UNBOUNDED  # of a step


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
    if problem.kv_dtype == NVFP4 and problem.head_dim % HEAD_GRAIN:
        return f"nvfp4 needs a head_dim that is a multiple of {HEAD_GRAIN}, not {problem.head_dim}"
    if problem.head_dim not in variant.head_dims:
        return f"it knows head_dim {_list(variant.head_dims)}, not {problem.head_dim}"
    if problem.group * problem.num_queries > variant.max_group:
        each = f" for each of {problem.num_queries} queries" if problem.num_queries > 1 else ""
        return f"it serves up to {variant.max_group} heads per KV head, not {problem.group}{each}"
    if problem.return_lse and not variant.writes_lse:
        return "it leaves no log-sum-exp"
    if variant.max_keys is not None and problem.max_keys > variant.max_keys:
        return f"it serves queries that see {variant.max_keys} keys at most, not {_count(problem.max_keys)}"
    if variant.max_seqs is not None and problem.max_seqs > variant.max_seqs:
        return f"it serves steps of {variant.max_seqs} sequences at most, not {_count(problem.max_seqs)}"
    return _refuse_launch(variant, problem)


def refuse_gpu(variant: Variant, capability: tuple[int, int]) -> str | None:
    """Say why ``variant`` serves nothing on GPUs of ``capability``, or None if it serves something."""
    reasons = []
    for (dtype, kv_dtype), head_dim in product(variant.dtypes, {variant.head_dims[0], variant.head_dims[-1]}):
        problem = VariantProblem(dtype, kv_dtype, head_dim, 1, capability)
        problem = replace(problem, max_keys=variant.max_keys or UNBOUNDED, max_seqs=variant.max_seqs or UNBOUNDED)
        reason = refuse_variant(variant, problem)
        if reason is None:
            return None
        reasons.append(reason)
    return reasons[-1]


def _refuse_launch(variant: Variant, problem: VariantProblem) -> str | None:
    """Say so if the variant would not start on the problem's GPU."""
    if variant.launch is None:
        return None
    if reason := refuse_architecture(problem.capability):
        return reason
    num_rows = problem.group * problem.num_queries
    needed = variant.launch.shared_bytes(problem.head_dim, num_rows, element_bytes(problem.kv_dtype))
    given = SHARED_BYTES[problem.capability]
    if needed <= given:
        return None
    found = ".".join(map(str, problem.capability))
    return f"its launch takes {-(-needed >> 10)} KiB of shared memory; compute capability {found} has {given >> 10}"


def _name(dtype: torch.dtype) -> str:
    return "nvfp4" if dtype == NVFP4 else str(dtype).removeprefix("torch.")


def _list(numbers: range | tuple[int, ...]) -> str:
    if isinstance(numbers, range):
        return f"{numbers.start} to {numbers.stop - 1}"
    return ", ".join(map(str, numbers))


def _count(number: int) -> str:
    return "any number" if number == UNBOUNDED else str(number)
