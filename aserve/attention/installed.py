"""Whether the libraries of attention kernels are there; asked for without importing them, which takes seconds."""

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

CAKE_FMHA_VERSION = (0, 7, 4)  # of flashinfer-python, whose routes are known here
FLASH_ATTENTION = {  # flavour -> file, below one of the folders that its top package has
    "flash-attn-4": ("flash_attn", "cute/interface.py"),
    "flash-attn 3": ("flash_attn_interface", ""),
    "flash-attn 2": ("flash_attn", "flash_attn_interface.py"),
}


def flash_infer_refusal() -> str | None:
    """Say what FlashInfer's kernels lack here."""
    return _missing("flashinfer", "flashinfer-python") or _missing("triton", "triton") or _no_gpu()


def cake_fmha_refusal() -> str | None:
    """Say what FlashInfer's cake kernels lack here; whether the GPU is one of theirs is not asked."""
    if reason := flash_infer_refusal():
        return reason
    version = metadata.version("flashinfer-python")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    wanted = ".".join(map(str, CAKE_FMHA_VERSION))
    return None if numbers >= CAKE_FMHA_VERSION else f"flashinfer-python {version} is older than {wanted}"


def triton_refusal() -> str | None:
    """Say what this project's own kernels lack here."""
    return _missing("triton", "triton") or _no_gpu()


def flash_attention_refusal() -> str | None:
    """Say so if no flavour of flash-attn is there."""
    if any(has_flash_attention(flavour) for flavour in FLASH_ATTENTION):
        return _no_gpu()
    return f"none of {', '.join(FLASH_ATTENTION)} is installed"


def has_flash_attention(flavour: str) -> bool:
    """Whether a flavour of FLASH_ATTENTION is there."""
    package, file = FLASH_ATTENTION[flavour]
    spec = find_spec(package)
    if spec is None:
        return False
    folders = spec.submodule_search_locations
    return not file or any((Path(folder) / file).exists() for folder in folders or ())


def _missing(module: str, package: str) -> str | None:
    return None if find_spec(module) is not None else f"the package {package} is not installed"


def _no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "torch finds no CUDA device"
