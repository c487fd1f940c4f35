"""The table of attention backends, and how a setting becomes one of them."""

import logging
from dataclasses import replace

import torch

from aserve.attention import installed
from aserve.attention.base import PHASES, AttentionBackend, AttentionKind, AttentionProblem, Phase
from aserve.attention.hybrid import HybridBackend
from aserve.errors import ConfigError
from aserve.kernels.cake.tables import TABLES
from aserve.kernels.cpu import library
from aserve.registry import Entry, Registry

logger = logging.getLogger(__name__)


BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "torch": Entry("aserve.attention.torch_backend:TorchBackend"),
        "cpu": Entry("aserve.attention.cpu_backend:CpuBackend", library.refusal),
        "fi": Entry("aserve.attention.flash_infer_backend:FlashInferBackend", installed.flash_infer_refusal),
        "fa": Entry(
            "aserve.attention.flash_attention_backend:FlashAttentionBackend", installed.flash_attention_refusal
        ),
        "trtllm": Entry("aserve.attention.trtllm_backend:TrtllmBackend", installed.flash_infer_refusal),
        "cake": Entry("aserve.attention.cake_backend:CakeBackend", installed.triton_refusal),
    },
)

PREFERENCES = {  # what "auto" tries, best first, by the device's type or, on CUDA, by its compute capability
    "cpu": ("cpu", "torch"),
    "cuda": ("fi", "torch"),
    "cuda 9.0": ("fa,fi", "fi", "torch"),
    "cuda 10.0": ("trtllm", "fi", "torch"),
    "cuda 10.3": ("trtllm", "fi", "torch"),
}
# Before all others where they were measured to be faster: for pages of e4m3, and for those of 16 bits by size of heads,
# if several share a KV head and have no sinks.
FP8_PREFERENCES = {"cuda 9.0": ("cake",)}
HEAD_PREFERENCES = {("cuda 9.0", head_dim): ("fa,cake", "fi,cake") for head_dim in (64, 128)}
OWN_PREFERENCES = ("cake",)  # on CUDA before "torch", which comes last: for what the libraries do not serve
SINK_PREFERENCES = ("fa,cake", "cake")  # the same for layers with sinks
TABLE_PHASES: dict[str, Phase] = {"decode": "decode", "several": "prefill", "prefill": "prefill"}  # drafts are chunks
PAGE_SIZES = (16, 32, 64, 128, 256)  # tried in this order if the size is free


def resolve_backend(
    setting: str, problem: AttentionProblem, device: torch.device, *, may_change_page_size: bool = False
) -> AttentionBackend:
    """Return the backend that ``setting`` names, built for ``problem``: "auto", a name, or "prefill,decode".

    With ``may_change_page_size`` a backend that cannot use the problem's page size gets another, with a warning; look
    at ``backend.problem``. Raises ConfigError if a name is unknown, refused on this machine, or does not fit
    ``problem``, and for two backends that do not fit each other.
    """
    if setting == "auto":
        return _choose(problem, device)
    names = _split(setting)
    if len(names) == 2 and names[0] == names[1]:
        logger.warning("attention backend %r names %s twice; it is used alone", setting, names[0])
        names.pop()
    if not may_change_page_size:
        return _build(names, problem, device)
    refusals = []
    for page_size in dict.fromkeys((problem.page_size, *PAGE_SIZES)):
        candidate = replace(problem, page_size=page_size)
        if refusal := _refuse(names, candidate):
            refusals.append(refusal)
            continue
        if refusals:
            logger.warning("page_size=%d instead of %d (%s)", page_size, problem.page_size, refusals[0])
        return _build(names, candidate if refusals else problem, device)
    raise ConfigError(refusals[0])


def check_names(setting: str) -> None:
    """Raise ConfigError if ``setting`` names what is unknown or refused on this machine, whatever the model."""
    if setting != "auto":
        for name in _split(setting):
            BACKENDS.load(name)


def check_variants(cake_variants: tuple[str, ...], setting: str) -> None:
    """Raise ConfigError for a variant that is unknown, or of a phase that ``setting`` leaves to another backend."""
    phases = {variant.name: TABLE_PHASES[table] for table, variants in TABLES.items() for variant in variants}
    served = {phase for name, phases_of_name in _parts(_split(setting)) for phase in phases_of_name if name == "cake"}
    for name in cake_variants:
        if name not in phases:
            raise ConfigError(f"cake_variants: unknown variant {name!r}; known: {', '.join(phases)}")
        if not served:
            raise ConfigError(f"cake_variants: {name} needs attention_backend 'cake', alone or in a pair")
        if phases[name] not in served:
            raise ConfigError(f"cake_variants: {name} is for {phases[name]}, which is not cake's part of {setting!r}")


def refusals_here() -> dict[str, str | None]:
    """Map each backend to what keeps it from serving a usual model on this machine, None if nothing does."""
    kind = AttentionKind(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    problems = [AttentionProblem("cpu", torch.float32, torch.float32, PAGE_SIZES[0], (kind,))]
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        problems.append(AttentionProblem("cuda", torch.bfloat16, torch.bfloat16, PAGE_SIZES[0], (kind,), capability))
    return _refusals(problems)


def refusals_for(problem: AttentionProblem) -> dict[str, str | None]:
    """Map each backend to what keeps it from serving ``problem`` on this machine, None if nothing does."""
    return _refusals([problem])


def _refusals(problems: list[AttentionProblem]) -> dict[str, str | None]:
    return {name: refusal or _refuse_all(name, problems) for name, refusal in BACKENDS.refusals().items()}


def _refuse_all(name: str, problems: list[AttentionProblem]) -> str | None:
    backend = BACKENDS.load(name)
    refusals = {}
    for phase in PHASES:
        reasons = [reason for problem in problems if (reason := backend.refuse(problem, phase))]
        if len(reasons) == len(problems):
            refusals[phase] = reasons[-1]
    if len(refusals) == len(PHASES):
        return refusals[PHASES[0]]
    return next((f"for {phase}: {reason}" for phase, reason in refusals.items()), None)


def _split(setting: str) -> list[str]:
    names = [name.strip() for name in setting.split(",")]
    if len(names) > 2 or not all(names):
        raise ConfigError(f"attention backend {setting!r}: write one name, or 'prefill,decode' with exactly one comma")
    return names


def _parts(names: list[str]) -> list[tuple[str, tuple[Phase, ...]]]:
    """Return what each of one or two names has to serve."""
    return [(names[0], PHASES)] if len(names) == 1 else list(zip(names, (("prefill",), ("decode",)), strict=True))


def _refuse(names: list[str], problem: AttentionProblem) -> str | None:
    """Say why the backends of ``names`` cannot serve ``problem``. Raises ConfigError for names of no use here."""
    for name, phases in _parts(names):
        backend = BACKENDS.load(name)
        refusals = {phase: reason for phase in phases if (reason := backend.refuse(problem, phase))}
        if len(refusals) == len(phases):
            return f"attention backend {name!r} cannot serve this model: {refusals[phases[0]]}"
        if refusals:
            return _refuse_alone(name, refusals)
    return None


def _refuse_alone(name: str, refusals: dict[Phase, str]) -> str:
    ((phase, reason),) = refusals.items()
    partner = "fi" if name != "fi" else "torch"
    pair = f"{partner},{name}" if phase == "prefill" else f"{name},{partner}"
    return f"attention backend {name!r} cannot serve {phase} here: {reason}; pair it with another, as in {pair!r}"


def _build(names: list[str], problem: AttentionProblem, device: torch.device) -> AttentionBackend:
    if refusal := _refuse(names, problem):
        raise ConfigError(refusal)
    backends = [BACKENDS.load(name)(problem, device, phases) for name, phases in _parts(names)]
    return backends[0] if len(backends) == 1 else HybridBackend(*backends)


def _choose(problem: AttentionProblem, device: torch.device) -> AttentionBackend:
    refused = []
    for setting in preferences(problem):
        try:
            backend = _build(_split(setting), problem, device)
        except ConfigError as error:
            refused.append(str(error))
            continue
        reason = "; ".join(refused) or f"first choice on {_describe(problem)}"
        logger.info("attention_backend=%s (%s)", setting, reason)
        return backend
    raise ConfigError(f"no attention backend can be used: {'; '.join(refused)}")


def preferences(problem: AttentionProblem) -> tuple[str, ...]:
    """Return what "auto" tries for ``problem``, best first."""
    gpu = _describe(problem)
    usual = PREFERENCES.get(gpu, PREFERENCES[problem.device_type])
    if problem.device_type != "cuda":
        return usual
    faster = _faster(problem, gpu)
    has_sinks = any(kind.has_sinks for kind in problem.kinds)
    return (*faster, *usual[:-1], *(SINK_PREFERENCES if has_sinks else OWN_PREFERENCES), usual[-1])


def _faster(problem: AttentionProblem, gpu: str) -> tuple[str, ...]:
    """Return what was measured to be faster than the usual choice, if it serves ``problem``."""
    if problem.kv_dtype == torch.float8_e4m3fn:
        return FP8_PREFERENCES.get(gpu, ())
    head_dims = {kind.head_dim for kind in problem.kinds}
    is_16_bit = problem.kv_dtype in (torch.float16, torch.bfloat16)
    are_measured = all(kind.num_heads > kind.num_kv_heads and not kind.has_sinks for kind in problem.kinds)
    return HEAD_PREFERENCES.get((gpu, min(head_dims)), ()) if is_16_bit and are_measured and len(head_dims) == 1 else ()


def _describe(problem: AttentionProblem) -> str:
    """'cpu', or 'cuda 9.0' for Hopper."""
    if problem.device_type == "cpu":
        return "cpu"
    return f"{problem.device_type} {problem.capability[0]}.{problem.capability[1]}"
