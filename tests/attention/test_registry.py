"""What a setting resolves to, and what is refused with which words."""

import logging

import pytest
import torch

from aserve.attention import registry
from aserve.attention.base import AttentionProblem
from aserve.attention.hybrid import HybridBackend
from aserve.attention.registry import BACKENDS, resolve_backend
from aserve.attention.torch_backend import TorchBackend
from aserve.errors import ConfigError
from aserve.registry import Entry, Registry

PROBLEM = AttentionProblem("cpu", torch.float32, num_heads=9, num_kv_heads=3, head_dim=64, page_size=16)


class PickyBackend(TorchBackend):
    name = "picky"

    @classmethod
    def refuse(cls, problem: AttentionProblem) -> str | None:
        return f"it needs head_dim 128, not {problem.head_dim}" if problem.head_dim != 128 else None


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with one backend that fits no model here and one that this machine refuses."""
    entries = {
        "torch": Entry("aserve.attention.torch_backend:TorchBackend"),
        "picky": Entry(f"{__name__}:PickyBackend"),
        "absent": Entry("nowhere:Nothing", lambda: "there is no compiler"),
    }
    monkeypatch.setattr(registry, "BACKENDS", Registry("attention backend", entries))
    monkeypatch.setitem(registry.PREFERENCES, "cpu", ("absent", "picky", "torch"))


def test_torch_is_always_there() -> None:
    assert BACKENDS.refusals()["torch"] is None
    assert isinstance(resolve_backend("torch", PROBLEM), TorchBackend)


def test_unknown_names_are_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="unknown attention backend 'fa9'; known: torch, cpu"):
        resolve_backend("fa9", PROBLEM)
    with pytest.raises(ConfigError, match="unknown attention backend 'fa9'"):
        resolve_backend("torch,fa9", PROBLEM)


@pytest.mark.parametrize("setting", ["", ",", "torch,", ",torch", "torch,torch,torch", " , "])
def test_a_hybrid_has_exactly_one_comma(setting: str) -> None:
    with pytest.raises(ConfigError, match="exactly one comma"):
        resolve_backend(setting, PROBLEM)


def test_the_same_name_twice_warns_and_becomes_single(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(resolve_backend("torch,torch", PROBLEM), TorchBackend)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "names torch twice" in caplog.text


@pytest.mark.usefixtures("backends")
def test_two_names_make_a_hybrid() -> None:
    problem = AttentionProblem("cpu", torch.float32, num_heads=2, num_kv_heads=2, head_dim=128, page_size=16)
    backend = resolve_backend("picky, torch", problem)
    assert isinstance(backend, HybridBackend)
    assert backend.name == "picky,torch"


@pytest.mark.usefixtures("backends")
def test_what_cannot_run_or_does_not_fit_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="'absent' cannot be used here: there is no compiler"):
        resolve_backend("absent", PROBLEM)
    with pytest.raises(ConfigError, match="'picky' cannot serve this model: it needs head_dim 128, not 64"):
        resolve_backend("torch,picky", PROBLEM)


@pytest.mark.usefixtures("backends")
def test_auto_takes_the_first_that_fits_and_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert resolve_backend("auto", PROBLEM).name == "torch"
    assert "attention_backend=torch" in caplog.text
    assert "there is no compiler" in caplog.text
    assert "it needs head_dim 128" in caplog.text


@pytest.mark.usefixtures("backends")
def test_auto_fails_with_all_reasons_if_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PREFERENCES, "cpu", ("absent", "picky"))
    with pytest.raises(ConfigError, match=r"there is no compiler.*it needs head_dim 128"):
        resolve_backend("auto", PROBLEM)
