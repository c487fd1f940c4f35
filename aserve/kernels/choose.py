"""Which operators a device gets."""

import importlib.util
import logging

import torch

from aserve.kernels.cpu.library import refusal
from aserve.kernels.operators import Operators

log = logging.getLogger(__name__)


def choose_operators(device: torch.device) -> Operators:
    """Return the fastest operators that work on ``device`` here."""
    if device.type == "cuda":
        return _choose_gpu_operators(device)
    if device.type != "cpu" or refusal() is not None:
        return Operators()
    from aserve.kernels.cpu_operators import CpuOperators

    return CpuOperators()


def _choose_gpu_operators(device: torch.device) -> Operators:
    if importlib.util.find_spec("triton") is None:
        log.warning("Triton is not installed, torch's operators are used instead")
        return Operators()
    from aserve.kernels.gpu.gpu_operators import GpuOperators
    from aserve.kernels.gpu.launch import can_overlap

    return GpuOperators(overlap=can_overlap(device))
