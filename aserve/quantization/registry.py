"""The quant methods by name, and the reasons why one cannot be used here."""

import logging

import torch

from aserve.errors import ConfigError
from aserve.kernels.cpu.library import refusal as kernel_refusal
from aserve.quantization.base import QuantMethod
from aserve.registry import Entry, Registry

logger = logging.getLogger(__name__)

QUANT_METHODS: Registry[type[QuantMethod]] = Registry(
    "quantization",
    {
        "none": Entry("aserve.quantization.unquantized:Unquantized"),
        "int8_cpu": Entry("aserve.quantization.int8_cpu:Int8Cpu", kernel_refusal),
        "int8_torch": Entry("aserve.quantization.int8_torch:Int8Torch"),
    },
)
INT8_BY_PREFERENCE = ("int8_cpu", "int8_torch")
CPU_ONLY = INT8_BY_PREFERENCE


def resolve_quantization(name: str, device: torch.device, *, is_demo: bool = False) -> QuantMethod:
    """Return the method that ``name`` ("auto", "none", "int8" or a row of QUANT_METHODS) means on ``device``.

    Raises ConfigError if it is unknown or cannot be used here.
    """
    method = QUANT_METHODS.load(_resolve_name(name, device, is_demo))()
    if method.name in CPU_ONLY and device.type != "cpu":
        raise ConfigError(f"quantization {name!r} runs on a CPU only, not on {device.type}")
    return method


def _resolve_name(name: str, device: torch.device, is_demo: bool) -> str:
    if name == "auto":
        name = "int8" if is_demo and device.type == "cpu" else "none"
    if name != "int8":
        return name
    refusals = QUANT_METHODS.refusals()
    chosen = next(method for method in INT8_BY_PREFERENCE if refusals[method] is None)
    reasons = [f"{method}: {reason}" for method, reason in refusals.items() if method in INT8_BY_PREFERENCE and reason]
    logger.info("quantization int8 = %s%s", chosen, f" ({'; '.join(reasons)})" if reasons else "")
    return chosen
