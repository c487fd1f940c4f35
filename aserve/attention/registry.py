"""The table of attention backends, and how a setting becomes one of them."""

import logging

import torch

from aserve.attention.base import AttentionBackend, AttentionProblem
from aserve.attention.hybrid import HybridBackend
from aserve.errors import ConfigError
from aserve.kernels.cpu import library
from aserve.registry import Entry, Registry

logger = logging.getLogger(__name__)


BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "torch": Entry("aserve.attention.torch_backend:TorchBackend"),
        "cpu": Entry("aserve.attention.cpu_backend:CpuBackend", library.refusal),
    },
)

PREFERENCES = {"cpu": ("cpu", "torch"), "cuda": ("torch",)}  # device type -> names that "auto" tries, best first


def resolve_backend(setting: str, problem: AttentionProblem, device: torch.device) -> AttentionBackend:
    """Return the backend that ``setting`` names, built for ``problem``: "auto", a name, or "prefill,decode".

    Raises ConfigError if a name is unknown, refused on this machine, or does not fit ``problem``, and for two backends
    that do not fit each other.
    """
    if setting == "auto":
        return _choose(problem, device)
    names = [name.strip() for name in setting.split(",")]
    if len(names) > 2 or not all(names):
        raise ConfigError(f"attention backend {setting!r}: write one name, or 'prefill,decode' with exactly one comma")
    if len(names) == 2 and names[0] == names[1]:
        logger.warning("attention backend %r names %s twice; it is used alone", setting, names[0])
        names.pop()
    backends = [_load(name, problem, device) for name in names]
    return backends[0] if len(backends) == 1 else HybridBackend(*backends)


def _load(name: str, problem: AttentionProblem, device: torch.device) -> AttentionBackend:
    backend = BACKENDS.load(name)
    if reason := backend.refuse(problem):
        raise ConfigError(f"attention backend {name!r} cannot serve this model: {reason}")
    return backend(problem, device)


def _choose(problem: AttentionProblem, device: torch.device) -> AttentionBackend:
    refused = []
    for name in PREFERENCES[problem.device_type]:
        try:
            backend = _load(name, problem, device)
        except ConfigError as error:
            refused.append(str(error))
            continue
        reason = "; ".join(refused) or f"first choice on {problem.device_type}"
        logger.info("attention_backend=%s (%s)", name, reason)
        return backend
    raise ConfigError(f"no attention backend can be used: {'; '.join(refused)}")
