"""From what a model asks to the variant that serves it, and why the faster ones do not."""

from dataclasses import dataclass

import torch

from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, DecodeVariant

FP8_CAPABILITY = (8, 9)  # the least that converts e4m3


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """What decides on a variant."""

    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype
    head_dim: int
    group: int  # query heads of a KV head
    capability: tuple[int, int]  # of the GPU
    return_lse: bool = False


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """The first row that serves a problem, None if none does, and the reasons of those before."""

    variant: DecodeVariant | None
    refusals: dict[str, str]  # by the name of the row


def select_decode(problem: DecodeProblem, variants: tuple[DecodeVariant, ...] = DECODE_VARIANTS) -> DecodeChoice:
    """Go through ``variants``, the fastest first."""
    refusals: dict[str, str] = {}
    for variant in variants:
        reason = refuse_decode(variant, problem)
        if reason is None:
            return DecodeChoice(variant, refusals)
        refusals[variant.name] = reason
    return DecodeChoice(None, refusals)


def refuse_decode(variant: DecodeVariant, problem: DecodeProblem) -> str | None:
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
