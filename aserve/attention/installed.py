"""Whether the libraries of attention kernels are there; asked for without importing them, which takes seconds."""

from importlib.util import find_spec
from pathlib import Path

import torch

FLASH_ATTENTION = {  # flavour -> file, below one of the folders that its top package has
    "flash-attn-4": ("flash_attn", "cute/interface.py"),
    "flash-attn 3": ("flash_attn_interface", ""),
    "flash-attn 2": ("flash_attn", "flash_attn_interface.py"),
}


def flash_infer_refusal() -> str | None:
    """Say what FlashInfer's kernels lack here."""
    return _missing("flashinfer", "flashinfer-python") or _missing("triton", "triton") or _no_gpu()


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
