"""The dtype in which matrices are multiplied."""

import torch
import triton
import triton.language as tl


def factor_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of the factors of matrix products of queries in ``dtype``.

    Triton's interpreter multiplies no bfloat16. A GPU has no instruction from e4m3 to bfloat16, but one to float16.
    """
    if triton.knobs.runtime.interpret or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == kv_dtype == torch.bfloat16 else tl.float16
