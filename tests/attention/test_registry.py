"""What a setting resolves to, and what is refused with which words."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from doubles_attention import make_problem

from aserve.attention import flash_attention_flavours, registry
from aserve.attention.base import AttentionBackend, AttentionKind, AttentionProblem, AttentionSpec, KVOrder, Phase
from aserve.attention.cake_backend import CakeBackend
from aserve.attention.cake_choice import choose_decodes
from aserve.attention.cpu_backend import CpuBackend
from aserve.attention.flash_attention_backend import FlashAttentionBackend
from aserve.attention.flash_infer_backend import FlashInferBackend
from aserve.attention.hybrid import HybridBackend
from aserve.attention.registry import BACKENDS, resolve_backend
from aserve.attention.torch_backend import TorchBackend
from aserve.attention.trtllm_backend import TrtllmBackend
from aserve.builtin_models import BUILTIN_MODELS
from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.kernels.nvfp4 import NVFP4
from aserve.kernels.operators import Operators
from aserve.layers.weighted import WeightFormat
from aserve.models.config import DecoderConfig
from aserve.models.decoder import Decoder
from aserve.quantization.unquantized import Unquantized
from aserve.registry import Entry, Registry
from aserve.runner.attention_problem import Gpu, KVFormat, describe_problem

CPU = torch.device("cpu")
PROBLEM = make_problem()


class PickyBackend(TorchBackend):
    name = "picky"

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        (head_dim,) = {kind.head_dim for kind in problem.kinds}
        return None if head_dim == 128 else f"it needs head_dim 128, not {head_dim}"


class HeadsFirstBackend(TorchBackend):
    name = "heads-first"
    kv_order: KVOrder = "HND"


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with one backend that fits no model here and one that this machine refuses."""
    entries = {
        "torch": Entry("aserve.attention.torch_backend:TorchBackend"),
        "picky": Entry(f"{__name__}:PickyBackend"),
        "heads-first": Entry(f"{__name__}:HeadsFirstBackend"),
        "absent": Entry("nowhere:Nothing", lambda: "there is no compiler"),
    }
    monkeypatch.setattr(registry, "BACKENDS", Registry("attention backend", entries))
    monkeypatch.setitem(registry.PREFERENCES, "cpu", ("absent", "picky", "torch"))


def test_torch_is_always_there() -> None:
    assert BACKENDS.refusals()["torch"] is None
    assert isinstance(resolve_backend("torch", PROBLEM, CPU), TorchBackend)


def test_unknown_names_are_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="unknown attention backend 'fa9'; known: torch, cpu"):
        resolve_backend("fa9", PROBLEM, CPU)
    with pytest.raises(ConfigError, match="unknown attention backend 'fa9'"):
        resolve_backend("torch,fa9", PROBLEM, CPU)


@pytest.mark.parametrize("setting", ["", ",", "torch,", ",torch", "torch,torch,torch", " , "])
def test_a_hybrid_has_exactly_one_comma(setting: str) -> None:
    with pytest.raises(ConfigError, match="exactly one comma"):
        resolve_backend(setting, PROBLEM, CPU)


def test_the_same_name_twice_warns_and_becomes_single(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(resolve_backend("torch,torch", PROBLEM, CPU), TorchBackend)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "names torch twice" in caplog.text


@pytest.mark.usefixtures("backends")
def test_two_names_make_a_hybrid() -> None:
    problem = make_problem(head_dim=128)
    backend = resolve_backend("picky, torch", problem, CPU)
    assert isinstance(backend, HybridBackend)
    assert backend.name == "picky,torch"
    assert backend.kv_order == "NHD"


@pytest.mark.usefixtures("backends")
def test_a_backend_is_built_for_the_problem_and_the_device() -> None:
    backend = resolve_backend("torch", PROBLEM, CPU)
    assert backend.problem is PROBLEM
    assert backend.device is CPU


@pytest.mark.usefixtures("backends")
def test_the_halves_of_a_hybrid_read_the_same_pool() -> None:
    assert resolve_backend("heads-first", PROBLEM, CPU).kv_order == "HND"
    with pytest.raises(ConfigError, match="torch wants pages in NHD order, heads-first in HND"):
        resolve_backend("torch,heads-first", PROBLEM, CPU)


def test_layers_that_differ_only_in_place_and_values_are_of_one_kind() -> None:
    sinks = torch.zeros(9)
    specs = [AttentionSpec(i, 9, 3, 64, 0.125, sinks=sinks + i) for i in range(2)]
    assert specs[0].kind == specs[1].kind == AttentionKind(9, 3, 64, 0.125, has_sinks=True)
    others = [{"sliding_window": 7}, {"softcap": 30.0}, {"sinks": sinks}, {}]
    assert len({AttentionSpec(0, 9, 3, 64, 0.125, **other).kind for other in others}) == 4  # type: ignore[arg-type]


@pytest.mark.usefixtures("backends")
def test_what_cannot_run_or_does_not_fit_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="'absent' cannot be used here: there is no compiler"):
        resolve_backend("absent", PROBLEM, CPU)
    with pytest.raises(ConfigError, match="'picky' cannot serve this model: it needs head_dim 128, not 64"):
        resolve_backend("torch,picky", PROBLEM, CPU)


@pytest.mark.usefixtures("backends")
def test_auto_takes_the_first_that_fits_and_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert resolve_backend("auto", PROBLEM, CPU).name == "torch"
    assert "attention_backend=torch" in caplog.text
    assert "there is no compiler" in caplog.text
    assert "it needs head_dim 128" in caplog.text


@pytest.mark.usefixtures("backends")
def test_auto_fails_with_all_reasons_if_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PREFERENCES, "cpu", ("absent", "picky"))
    with pytest.raises(ConfigError, match=r"there is no compiler.*it needs head_dim 128"):
        resolve_backend("auto", PROBLEM, CPU)


class DecodeOnlyBackend(TorchBackend):
    name = "decode-only"

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        return "it has no such kernel" if phase == "prefill" else None


class LargePagesBackend(TorchBackend):
    name = "large-pages"

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        return None if problem.page_size in (64, 128) else f"it needs page_size 64 or 128, not {problem.page_size}"


@pytest.fixture
def partial_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "torch": Entry("aserve.attention.torch_backend:TorchBackend"),
        "decode-only": Entry(f"{__name__}:DecodeOnlyBackend"),
        "large-pages": Entry(f"{__name__}:LargePagesBackend"),
        "absent": Entry("nowhere:Nothing", lambda: "the package is not installed"),
    }
    monkeypatch.setattr(registry, "BACKENDS", Registry("attention backend", entries))


@pytest.mark.usefixtures("partial_backends")
def test_a_backend_for_one_phase_is_half_of_a_pair() -> None:
    with pytest.raises(ConfigError, match=r"'decode-only' cannot serve prefill here: it has no such kernel; pair it"):
        resolve_backend("decode-only", PROBLEM, CPU)
    with pytest.raises(ConfigError, match=r"as in 'fi,decode-only'"):
        resolve_backend("decode-only", PROBLEM, CPU)
    with pytest.raises(ConfigError, match="'decode-only' cannot serve this model: it has no such kernel"):
        resolve_backend("decode-only,torch", PROBLEM, CPU)
    assert resolve_backend("torch,decode-only", PROBLEM, CPU).name == "torch,decode-only"


@pytest.mark.usefixtures("partial_backends")
def test_each_half_is_told_the_phase_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(TorchBackend, "__init__", lambda self, *arguments: seen.append(arguments[2:]))
    monkeypatch.setattr(HybridBackend, "__init__", lambda self, *parts: None)
    resolve_backend("torch,decode-only", PROBLEM, CPU)
    resolve_backend("torch", PROBLEM, CPU)
    assert seen == [(("prefill",),), (("decode",),), (("prefill", "decode"),)]


@pytest.mark.usefixtures("partial_backends")
@pytest.mark.parametrize("setting", ["large-pages", "large-pages,torch", "torch,large-pages"])
def test_a_free_page_size_adapts_with_a_warning_and_a_set_one_is_refused(
    setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="it needs page_size 64 or 128, not 16"):
        resolve_backend(setting, PROBLEM, CPU)
    assert not caplog.records
    assert resolve_backend(setting, PROBLEM, CPU, may_change_page_size=True).problem.page_size == 64
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("page_size=64 instead of 16 (")
    assert "it needs page_size 64 or 128" in record.getMessage()


@pytest.mark.usefixtures("partial_backends")
def test_no_page_size_helps_against_another_reason() -> None:
    with pytest.raises(ConfigError, match="it has no such kernel"):
        resolve_backend("decode-only", PROBLEM, CPU, may_change_page_size=True)
    assert resolve_backend("torch", PROBLEM, CPU, may_change_page_size=True).problem is PROBLEM


def on_gpu(capability: tuple[int, int], **change: Any) -> AttentionProblem:
    problem = make_problem("cuda", torch.bfloat16, num_heads=32, num_kv_heads=8, head_dim=128)
    return dataclasses.replace(problem, capability=capability, **change)


PLAYED_ENTRIES = {
    "fi": Entry("aserve.attention.flash_infer_backend:FlashInferBackend"),
    "fa": Entry("aserve.attention.flash_attention_backend:FlashAttentionBackend"),
    "trtllm": Entry("aserve.attention.trtllm_backend:TrtllmBackend"),
    "cake": Entry("aserve.attention.cake_backend:CakeBackend"),
}
GPU_CHOICES = [
    ((9, 0), {"fi", "fa", "trtllm"}, "fa,fi"),
    ((9, 0), {"fi", "trtllm"}, "fi"),
    ((9, 0), {"fa"}, "torch"),
    ((10, 0), {"fi", "fa", "trtllm"}, "trtllm"),
    ((10, 3), {"fi", "fa", "trtllm"}, "trtllm"),
    ((8, 0), {"fi", "fa", "trtllm"}, "fi"),
    ((12, 0), {"fi", "fa", "trtllm"}, "fi"),
    ((9, 0), {"cake"}, "cake"),
    ((9, 0), {"fi", "cake"}, "fi,cake"),
    ((9, 0), {"fi", "fa", "trtllm", "cake"}, "fa,cake"),
    ((10, 0), {"fi", "cake"}, "fi"),
    ((8, 0), {"fi", "cake"}, "fi"),
    ((7, 5), {"fi", "cake"}, "torch"),
    ((9, 0), set(), "torch"),
]
HEAD_CHOICES = {  # of 32 heads on Hopper, as docs/measurements.md has them; others keep the usual choice
    (8, 64, torch.bfloat16): "fa,cake",
    (16, 128, torch.float16): "fa,cake",
    (32, 128, torch.bfloat16): "fa,fi",  # large batches of heads that share no keys
    (8, 256, torch.bfloat16): "fa,fi",
}
SINK_CHOICES = [  # for a model whose layers have sinks
    ((9, 0), {"fi", "fa", "trtllm", "cake"}, "fa,cake"),
    ((9, 0), {"fi", "trtllm", "cake"}, "cake"),
    ((9, 0), {"fi", "fa", "trtllm"}, "torch"),
    ((10, 0), {"fi", "fa", "trtllm", "cake"}, "trtllm"),
    ((10, 0), {"fa", "cake"}, "fa,cake"),
    ((8, 0), {"fi", "fa", "trtllm", "cake"}, "cake"),
    ((7, 5), {"fi", "fa", "trtllm", "cake"}, "torch"),
]


@pytest.fixture
def played_backends(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[str]], None]:
    """Return what makes a table of the real refusals, with flash-attn-4 as the flavour; only building is played."""
    monkeypatch.setattr(flash_attention_flavours, "has_flash_attention", lambda flavour: flavour == "flash-attn-4")

    def install(installed: set[str]) -> None:
        entries = {
            name: Entry(entry.target, lambda name=name: None if name in installed else f"{name} is not installed")
            for name, entry in PLAYED_ENTRIES.items()
        }
        entries["torch"] = Entry("aserve.attention.torch_backend:TorchBackend")
        monkeypatch.setattr(registry, "BACKENDS", Registry("attention backend", entries))

    for backend in (FlashInferBackend, FlashAttentionBackend, TrtllmBackend, CakeBackend):
        monkeypatch.setattr(backend, "__init__", AttentionBackend.__init__)
    return install


@pytest.mark.parametrize(("capability", "installed", "expected"), GPU_CHOICES)
def test_auto_on_a_gpu(
    capability: tuple[int, int],
    installed: set[str],
    expected: str,
    played_backends: Callable[[set[str]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    played_backends(installed)
    assert resolve_backend("auto", on_gpu(capability), CPU).name == expected
    assert f"attention_backend={expected} (" in caplog.text


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "dtype"), HEAD_CHOICES)
def test_auto_by_heads(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, played_backends: Callable[[set[str]], None]
) -> None:
    played_backends({"fi", "fa", "cake"})
    problem = on_gpu((9, 0), kinds=(AttentionKind(32, num_kv_heads, head_dim, 0.125),), dtype=dtype, kv_dtype=dtype)
    assert resolve_backend("auto", problem, CPU).name == HEAD_CHOICES[num_kv_heads, head_dim, dtype]


@pytest.mark.parametrize(("capability", "installed", "expected"), SINK_CHOICES)
def test_auto_for_layers_with_sinks(
    capability: tuple[int, int],
    installed: set[str],
    expected: str,
    played_backends: Callable[[set[str]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As gpt-oss has them: every other layer with a window besides."""
    caplog.set_level(logging.INFO)
    played_backends(installed)
    kind = AttentionKind(64, 8, 64, 0.125, has_sinks=True)
    problem = on_gpu(capability, kinds=(kind, dataclasses.replace(kind, sliding_window=128)))
    assert resolve_backend("auto", problem, CPU).name == expected
    (choice,) = (record.getMessage() for record in caplog.records if "attention_backend=" in record.getMessage())
    assert choice.startswith(f"attention_backend={expected} (")
    if "fi" in installed and expected != "trtllm":
        assert ("no attention sinks" if capability >= (8, 0) else "compute capability 8.0 or more") in choice


TRUE_SIZES = {  # on Hopper with all that there is: what "auto" takes, and the rows of "cake" for decodes, by kind
    "gemma-2-9b": ("fa,fi", ["decode-16-d256", "decode-16-d256"]),
    "gemma-3-4b": ("fa,fi", ["decode-16-d256", "decode-16-d256"]),
    "Phi-3-mini-4k": ("cake", ["decode-16-d128"]),
    "Phi-3-medium-4k": ("fa,cake", ["decode-16-d128"]),
    "gpt-oss-20b": ("fa,cake", ["decode-16-d64-short", "decode-16-d64"]),
}


@pytest.mark.parametrize("name", TRUE_SIZES)
def test_models_of_true_size_on_hopper(
    name: str,
    played_backends: Callable[[set[str]], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    played_backends({"fi", "fa", "trtllm", "cake"})
    monkeypatch.setattr("aserve.layers.rotary.RotaryTable._build", lambda self, divisors: torch.empty(0))
    weights = WeightFormat(Unquantized(), torch.bfloat16, torch.device("meta"))
    model = Decoder(DecoderConfig.from_hf(BUILTIN_MODELS[name]), weights, Operators())
    cuda, gpu = torch.device("cuda"), Gpu("NVIDIA H200", (9, 0))
    problem = describe_problem(EngineConfig(), model, cuda, torch.bfloat16, KVFormat(torch.bfloat16), gpu)
    auto, rows = TRUE_SIZES[name]
    assert resolve_backend("auto", problem, CPU).name == auto
    assert resolve_backend("cake", problem, CPU).name == "cake"
    choices = [choose_decodes(problem, kind)[-1].choice.variant for kind in problem.kinds]
    assert [row.name for row in choices if row is not None] == rows
    refused = {"Phi-3-mini-4k": "it knows head_dim 64, 128, 256, not 96", "gpt-oss-20b": "no attention sinks"}
    if (reason := refused.get(name)) is None:
        assert resolve_backend("fi", problem, CPU).name == "fi"
    else:
        assert reason in caplog.text
        with pytest.raises(ConfigError, match=f"'fi' cannot serve this model: .*{reason}"):
            resolve_backend("fi", problem, CPU)


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [
        ((9, 0), {"fi", "fa", "trtllm", "cake"}, "cake"),
        ((10, 0), {"fi", "fa", "trtllm", "cake"}, "cake"),
        ((8, 0), {"fi", "fa", "trtllm", "cake"}, "torch"),
        ((9, 0), {"fi", "fa", "trtllm"}, "torch"),
    ],
)
def test_auto_for_pages_of_nvfp4(
    capability: tuple[int, int],
    installed: set[str],
    expected: str,
    played_backends: Callable[[set[str]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    played_backends(installed)
    assert resolve_backend("auto", on_gpu(capability, kv_dtype=NVFP4), CPU).name == expected
    (choice,) = (record.getMessage() for record in caplog.records if "attention_backend=" in record.getMessage())
    assert "it does not read nvfp4 with queries in bfloat16" in choice


@pytest.mark.parametrize("setting", ["fi", "fa", "trtllm", "fi,cake", "cpu"])
def test_pages_of_nvfp4_are_refused_by_who_does_not_read_them(
    setting: str, played_backends: Callable[[set[str]], None]
) -> None:
    played_backends({"fi", "fa", "trtllm", "cake"})
    if setting == "cpu":
        problem = dataclasses.replace(make_problem(), kv_dtype=NVFP4)
        assert CpuBackend.refuse(problem, "decode") == "it does not read nvfp4"
        return
    with pytest.raises(ConfigError, match=r"'(fi|fa|trtllm)' cannot serve .*nvfp4"):
        resolve_backend(setting, on_gpu((9, 0), kv_dtype=NVFP4), CPU)


def test_what_flash_attention_4_cannot_do_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_flavours, "has_flash_attention", lambda flavour: flavour == "flash-attn-4")
    monkeypatch.setattr(registry, "BACKENDS", Registry("attention backend", HOPPER_ENTRIES))
    with pytest.raises(ConfigError, match=r"'fa' cannot serve decode here: .*no split-KV on Hopper.*'fa,fi'"):
        resolve_backend("fa", on_gpu((9, 0)), CPU)
    with pytest.raises(ConfigError, match=r"'fa' cannot serve this model: .*no split-KV on Hopper"):
        resolve_backend("fi,fa", on_gpu((9, 0)), CPU)
    with pytest.raises(ConfigError, match=r"'trtllm' cannot serve prefill here: .*XQA.*'fi,trtllm'"):
        resolve_backend("trtllm", on_gpu((9, 0)), CPU)


@pytest.mark.parametrize("setting", ["cake", "torch,cake", "cake,torch"])
def test_cake_serves_both_phases_alone_or_in_pairs(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "torch": Entry("aserve.attention.torch_backend:TorchBackend"),
        "cake": Entry("aserve.attention.cake_backend:CakeBackend"),
    }
    monkeypatch.setattr(registry, "BACKENDS", Registry("attention backend", entries))
    assert resolve_backend(setting, on_gpu((9, 0)), CPU).name == setting


@pytest.mark.parametrize(("capability", "first"), [((9, 0), "cake"), ((8, 0), "fi"), ((10, 0), "trtllm")])
def test_auto_prefers_cake_for_8_bit_pages_where_that_is_faster(capability: tuple[int, int], first: str) -> None:
    problem = dataclasses.replace(on_gpu(capability), kv_dtype=torch.float8_e4m3fn)
    assert registry.preferences(problem)[0] == first


HOPPER_ENTRIES = {name: PLAYED_ENTRIES[name] for name in ("fi", "fa", "trtllm")}


def test_flash_attention_2_has_pages_of_256(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(flash_attention_flavours, "has_flash_attention", lambda flavour: flavour == "flash-attn 2")
    monkeypatch.setattr(registry, "BACKENDS", Registry("attention backend", HOPPER_ENTRIES))
    monkeypatch.setattr(FlashAttentionBackend, "__init__", AttentionBackend.__init__)
    problem = on_gpu((8, 0))
    with pytest.raises(ConfigError, match="multiple of 256, not 16"):
        resolve_backend("fa", problem, CPU)
    assert resolve_backend("fa", problem, CPU, may_change_page_size=True).problem.page_size == 256
    assert "page_size=256 instead of 16" in caplog.text


def test_what_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU with flash-attn-4: what each backend serves there, and reasons for the rest."""
    monkeypatch.setattr(flash_attention_flavours, "has_flash_attention", lambda flavour: flavour == "flash-attn-4")
    entries = {
        "torch": Entry("aserve.attention.torch_backend:TorchBackend"),
        "absent": Entry("nowhere:Nothing", lambda: "the package is not installed"),
        **HOPPER_ENTRIES,
    }
    monkeypatch.setattr(registry, "BACKENDS", Registry("attention backend", entries))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    refusals = registry.refusals_here()
    assert (refusals["torch"], refusals["fi"], refusals["absent"]) == (None, None, "the package is not installed")
    assert str(refusals["fa"]).startswith("for decode: flash-attn-4 has no split-KV on Hopper")
    assert str(refusals["trtllm"]).startswith("for prefill: on this GPU only its decode kernel, XQA, runs")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert registry.refusals_here()["trtllm"] == "it has no kernels for compute capability 8.0"
