"""What all kernels share: whether they can run on a tensor, and how a launch overlaps the kernel before it."""

import torch
import triton
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it still runs (programmatic dependent launch, from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(overlap: bool) -> dict[str, bool]:
    """Return the launch keywords for a kernel whose OVERLAP is ``overlap``.

    Each kernel launched so must call ``gdc_wait`` before it touches what an earlier kernel may have written or read:
    the wait is also what makes a kernel complete after all those before it.
    """
    return {"launch_pdl": True} if overlap else {}


def can_run(*tensors: Tensor) -> bool:
    """Whether kernels serve these: dense rows of one float dtype, on a GPU (or on a CPU under Triton's interpreter)."""
    first = tensors[0]
    return (
        (first.is_cuda or bool(triton.knobs.runtime.interpret))
        and first.dtype in FLOATS
        and all(tensor.dtype == first.dtype and tensor.is_contiguous() for tensor in tensors)
    )
