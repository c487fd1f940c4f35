"""Whether the libraries of attention kernels are there; asked for without importing them, which takes seconds."""

from importlib.util import find_spec


def flash_infer_refusal() -> str | None:
    """Say what FlashInfer's kernels lack here."""
    return _missing("flashinfer", "flashinfer-python") or triton_refusal()


def triton_refusal() -> str | None:
    """Say so if Triton is not there, which turns page tables into arguments."""
    return _missing("triton", "triton")


def _missing(module: str, package: str) -> str | None:
    return None if has_module(module) else f"the package {package} is not installed"


def has_module(name: str) -> bool:
    """Whether ``name``, which may be a submodule, can be imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is absent
        return False
