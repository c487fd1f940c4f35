"""What a setting resolves to, and what is refused with which words."""

import logging

import pytest
import torch
from doubles_attention import make_problem

from aserve.attention import registry
from aserve.attention.base import AttentionKind, AttentionProblem, AttentionSpec, KVOrder, Phase
from aserve.attention.hybrid import HybridBackend
from aserve.attention.registry import BACKENDS, resolve_backend
from aserve.attention.torch_backend import TorchBackend
from aserve.errors import ConfigError
from aserve.registry import Entry, Registry

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
