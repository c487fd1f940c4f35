"""Which operators a device gets."""

import torch

from aserve.kernels.cpu.library import refusal
from aserve.kernels.operators import Operators


def choose_operators(device: torch.device) -> Operators:
    """Return the fastest operators that work on ``device`` here."""
    if device.type != "cpu" or refusal() is not None:
        return Operators()
    from aserve.kernels.cpu_operators import CpuOperators

    return CpuOperators()
