"""The dtype in which matrices are multiplied, and queries in it."""

import torch
import triton
import triton.language as tl

MAX_FLOAT16 = tl.constexpr(65504.0)


def factor_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of the factors of matrix products of queries in ``dtype``.

    Triton's interpreter multiplies no bfloat16. A GPU has no instruction from e4m3 to bfloat16, but one to float16.
    """
    if triton.knobs.runtime.interpret or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == kv_dtype == torch.bfloat16 else tl.float16


@triton.jit
def to_factors(queries, FACTOR: tl.constexpr):
    """Return queries as factors of matrix products, the largest there are for what is too large."""
    if FACTOR == tl.float16:  # noqa: SIM300 - no constant; for queries in bfloat16, whose range is larger
        queries = tl.minimum(tl.maximum(queries.to(tl.float32), -MAX_FLOAT16), MAX_FLOAT16)
    return queries.to(FACTOR)
